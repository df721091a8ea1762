"""Built-in probes, one file per family. They name classes by qualified name, so no other library is imported."""

from infssm.ssm.probes import (  # noqa: F401  (importing registers)
    fla,
    gated_delta,
    kimi_delta,
    mamba3,
    mamba_ssm,
    mambapy,
    mambavision,
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
