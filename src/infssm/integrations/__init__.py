"""Adapters to other libraries, one module each, imported when used: transformers, timm, avalanche, lightning."""

from infssm._torchvision import mend as mend_torchvision

__all__ = ["mend_torchvision"]
