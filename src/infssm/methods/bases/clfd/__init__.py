"""CLFD: the method, and the model that learns from frequency maps."""

from infssm.methods.bases.clfd.clfd import CLFD, CLFDConfig

__all__ = ["CLFD", "CLFDConfig"]
