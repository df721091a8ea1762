"""State spaces: their Gram matrices and distances, recording them from any model, probes of other libraries' layers."""

from infssm.ssm import probes as _probes  # noqa: F401  (registers the built-in probes)
from infssm.ssm.compression import compress
from infssm.ssm.coverage import Coverage, LayerCoverage, coverage
from infssm.ssm.distances import describe_distance, distance, list_distances, principal_angles, register_distance
from infssm.ssm.gramian import gram, gram_dense
from infssm.ssm.mixers import find_mixers, state_parameters, unwrap
from infssm.ssm.old_model import OldModel
from infssm.ssm.probe import MixerInputs, Probe, StateOptions, describe_probe, list_probes, register_probe
from infssm.ssm.recorder import Observation, Recorder, StateRecord, logits_of, record_states
from infssm.ssm.space import StateSpace, soft_normalize

__all__ = [
    "Coverage",
    "LayerCoverage",
    "MixerInputs",
    "Observation",
    "OldModel",
    "Probe",
    "Recorder",
    "StateOptions",
    "StateRecord",
    "StateSpace",
    "compress",
    "coverage",
    "describe_distance",
    "describe_probe",
    "distance",
    "find_mixers",
    "gram",
    "gram_dense",
    "list_distances",
    "list_probes",
    "logits_of",
    "principal_angles",
    "record_states",
    "register_distance",
    "register_probe",
    "soft_normalize",
    "state_parameters",
    "unwrap",
]
