"""Nullspace (Mamba-CL): steps in the null space of old features."""

from infssm.methods.bases.nullspace.nullspace import Nullspace

__all__ = ["Nullspace"]
