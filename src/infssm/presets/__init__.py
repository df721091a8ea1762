"""Benchmarks as data: one YAML file each, every value traced to its table."""
