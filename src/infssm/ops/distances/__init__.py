"""Every distance as one formula in PyTorch, and the table of them."""

from infssm.ops.distances import energies as energies
from infssm.ops.distances._pair import Pair
from infssm.ops.distances.sampled import System, sampled_output
from infssm.ops.distances.subspaces import KINDS_OF_ANGLES, principal_angles, rotation_lattice, schubert_distance
from infssm.ops.distances.table import KINDS, Kind

__all__ = [
    "KINDS",
    "KINDS_OF_ANGLES",
    "Kind",
    "Pair",
    "System",
    "principal_angles",
    "rotation_lattice",
    "sampled_output",
    "schubert_distance",
]
