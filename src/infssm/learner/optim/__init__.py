"""How weights move: the optimizer, its learning rate, and a guard against steps that are not finite."""
