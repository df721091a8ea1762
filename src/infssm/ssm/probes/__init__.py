"""Built-in probes, one file per family. They name classes by qualified name, so no other library is imported."""

from infssm.ssm.probes import (  # noqa: F401  (importing registers)
    fla,
    gated_delta,
    kimi_delta,
    mamba,
    mamba2,
    mamba3,
    minimax,
    normalised,
    recurrent_gemma,
    refused,
    vmamba,
)

__all__: list[str] = []
