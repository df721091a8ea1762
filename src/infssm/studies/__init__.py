"""The paper's analyses: each a function that returns data and a figure."""

from infssm.studies import distance_speed, invariance, monte_carlo
from infssm.studies._study import Study, list_studies, register_study, run_study

__all__ = ["Study", "distance_speed", "invariance", "list_studies", "monte_carlo", "register_study", "run_study"]
