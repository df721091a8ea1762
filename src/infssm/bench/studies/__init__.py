"""The paper's analyses: each a function that returns data and a figure."""

from infssm.bench.studies import (
    blocks,
    ckd,
    distance_speed,
    drift,
    invariance,
    latency,
    monte_carlo,
    penalty_alone,
    variance,
)
from infssm.bench.studies.study import Study, describe_study, list_studies, register_study, run_study

__all__ = [
    "Study",
    "blocks",
    "ckd",
    "describe_study",
    "distance_speed",
    "drift",
    "invariance",
    "latency",
    "list_studies",
    "monte_carlo",
    "penalty_alone",
    "register_study",
    "run_study",
    "variance",
]
