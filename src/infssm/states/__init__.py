"""Recording the state spaces of any model's forward pass, and the probes that read them."""
