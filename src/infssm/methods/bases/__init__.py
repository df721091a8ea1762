"""One file per base method, or per family: what is trained on, and with which loss."""
