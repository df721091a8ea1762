"""LUCIR: the method, and its cosine classifier with the losses on it."""

from infssm.methods.bases.lucir.lucir import LUCIR, LUCIRConfig

__all__ = ["LUCIR", "LUCIRConfig"]
