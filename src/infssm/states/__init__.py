"""From any model's mixers to their states: recording, the probes of other libraries' layers, the frozen old model."""

from infssm.states import probes as _probes  # noqa: F401  (registers the built-in probes)
from infssm.states._mixers import find_mixers, state_parameters, unwrap
from infssm.states._old import OldModel
from infssm.states._outputs import Observation, OutputRecorder, logits_of
from infssm.states._probe import MixerInputs, Probe, StateOptions, register_probe
from infssm.states._recorder import Recorder, StateRecord, record_states

__all__ = [
    "MixerInputs",
    "Observation",
    "OldModel",
    "OutputRecorder",
    "Probe",
    "Recorder",
    "StateOptions",
    "StateRecord",
    "find_mixers",
    "logits_of",
    "record_states",
    "register_probe",
    "state_parameters",
    "unwrap",
]
