"""Every distance as one formula in PyTorch, and the table of them."""

from infssm.ops.distances import energies as energies
from infssm.ops.distances import subspaces as subspaces
from infssm.ops.distances._pair import Pair
from infssm.ops.distances.table import KINDS, Kind

__all__ = ["KINDS", "Kind", "Pair"]
