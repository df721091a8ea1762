"""What every method is made of: the contract, the context, building by name, the training step."""
