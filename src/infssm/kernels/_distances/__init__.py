"""Every distance as one formula in PyTorch, and the table of them."""

from infssm.kernels._distances import energies as energies
from infssm.kernels._distances import subspaces as subspaces
from infssm.kernels._distances._pair import Pair
from infssm.kernels._distances.table import KINDS, Kind

__all__ = ["KINDS", "Kind", "Pair"]
