"""UCL: the method, and the Gaussian weights it draws from."""

from infssm.methods.regularizers.ucl.ucl import UCL, UCLConfig

__all__ = ["UCL", "UCLConfig"]
