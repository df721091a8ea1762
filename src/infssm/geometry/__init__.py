"""Pure functions on the observability geometry of state space systems."""
