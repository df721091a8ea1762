"""The paper's analyses: each a function that returns data and a figure."""

from infssm.bench.studies import distances, latency, penalty, states, variance
from infssm.bench.studies.study import Study, describe_study, list_studies, register_study, run_study

__all__ = [
    "Study",
    "describe_study",
    "distances",
    "latency",
    "list_studies",
    "penalty",
    "register_study",
    "run_study",
    "states",
    "variance",
]
