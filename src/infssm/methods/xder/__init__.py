"""X-DER: the method, and its losses."""

from infssm.methods.xder.xder import XDER, XDERConfig

__all__ = ["XDER", "XDERConfig"]
