"""Readable state space backbones on the kernels of infssm, and the registry that builds them."""

from infssm.models._backbone import Backbone, create_model, from_pretrained
from infssm.models._mixer import STATE_SETS, RawStates, Scan, SSMMixer, StateRows, StateTap
from infssm.models._registry import list_models, register_model
from infssm.models.vim import VimMixer, VisionMamba

__all__ = [
    "STATE_SETS",
    "Backbone",
    "RawStates",
    "SSMMixer",
    "Scan",
    "StateRows",
    "StateTap",
    "VimMixer",
    "VisionMamba",
    "create_model",
    "from_pretrained",
    "list_models",
    "register_model",
]
