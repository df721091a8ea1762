"""Data sets; importing this package registers them."""

from infssm.data.sets import generated, published, text

__all__ = ["generated", "published", "text"]
