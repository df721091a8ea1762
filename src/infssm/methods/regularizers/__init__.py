"""One file per regularizer, or per family: a term that is added to the loss of a base."""
