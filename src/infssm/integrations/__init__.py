"""Adapters to other libraries, one module each, imported when used: transformers, timm, avalanche, lightning."""

__all__: list[str] = []
