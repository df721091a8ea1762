"""One file per data set, or per family of them; importing this registers all."""

from infssm.data.sets import digits

__all__ = ["digits"]
