"""L2P-R: the method, and the model with its pool of prompts."""

from infssm.methods.bases.l2p.l2p import L2PR, L2PRConfig

__all__ = ["L2PR", "L2PRConfig"]
