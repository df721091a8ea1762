"""Readable state space backbones on the kernels of infssm, and the registry that builds them."""

from infssm.models.backbone import Backbone, create_model, from_pretrained, kinds_of_model
from infssm.models.features import Classifier, find_classifier
from infssm.models.generate import generate
from infssm.models.generative import GenerativeClassifier
from infssm.models.mamba import MambaMixer
from infssm.models.mamba2 import Mamba2Mixer
from infssm.models.mixer import STATE_SETS, LayerState, RawStates, SequenceState, SSMMixer, StateRows, StateTap
from infssm.models.pretrained import check_weights, find_weights
from infssm.models.registry import describe_model, list_models, register_model
from infssm.models.s4d import S4DMixer, S4DModel
from infssm.models.sequence import CausalBackbone, LanguageModel, SequenceClassifier
from infssm.models.vim import VimMixer, VisionMamba
from infssm.models.vmamba import SS2D, VMamba

__all__ = [
    "SS2D",
    "STATE_SETS",
    "Backbone",
    "CausalBackbone",
    "Classifier",
    "GenerativeClassifier",
    "LanguageModel",
    "LayerState",
    "Mamba2Mixer",
    "MambaMixer",
    "RawStates",
    "S4DMixer",
    "S4DModel",
    "SSMMixer",
    "SequenceClassifier",
    "SequenceState",
    "StateRows",
    "StateTap",
    "VMamba",
    "VimMixer",
    "VisionMamba",
    "check_weights",
    "create_model",
    "describe_model",
    "find_classifier",
    "find_weights",
    "from_pretrained",
    "generate",
    "kinds_of_model",
    "list_models",
    "register_model",
]
