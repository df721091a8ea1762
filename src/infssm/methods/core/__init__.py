"""The core of every method: contract, context, building by name, training step."""
