"""Continual-learning methods: one contract, one file per method, composition by name."""
