"""Readable state space backbones and their weights."""
