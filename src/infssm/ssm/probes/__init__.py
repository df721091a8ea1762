"""Built-in probes, one file per family. They name classes by qualified name, so no other library is imported."""

from infssm.ssm.probes import (  # noqa: F401  (importing registers)
    gated_delta,
    kimi_delta,
    mamba_ssm,
    mambapy,
    minimax,
    normalised,
    recurrent_gemma,
    refused,
    transformers_mamba,
    transformers_mamba2,
    transformers_zamba,
    vmamba,
)

__all__: list[str] = []
