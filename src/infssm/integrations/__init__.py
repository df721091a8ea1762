"""Bridges to other libraries; each file imports its library lazily."""
