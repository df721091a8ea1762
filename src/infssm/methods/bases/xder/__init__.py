"""X-DER: the method, and its losses."""

from infssm.methods.bases.xder.xder import XDER, XDERConfig

__all__ = ["XDER", "XDERConfig"]
