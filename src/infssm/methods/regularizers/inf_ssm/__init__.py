"""Inf-SSM in its three forms, and the weight that sets itself."""

from infssm.methods.regularizers.inf_ssm.inf_ssm import (
    InfSSM,
    InfSSMConfig,
    InfSSMExact,
    InfSSMExactConfig,
    InfSSMPlus,
    InfSSMPlusConfig,
)

__all__ = ["InfSSM", "InfSSMConfig", "InfSSMExact", "InfSSMExactConfig", "InfSSMPlus", "InfSSMPlusConfig"]
