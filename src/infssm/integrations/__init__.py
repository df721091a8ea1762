"""Adapters to other libraries, one module each, imported when used; `serve` is a learner as a web page."""

from infssm._torchvision import mend as mend_torchvision

__all__ = ["mend_torchvision"]
