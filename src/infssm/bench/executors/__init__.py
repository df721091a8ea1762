"""Where experiments are carried out: here, in several processes of this machine, on a Ray cluster.

An :class:`Executor` carries out a plan, a list of :class:`~infssm.bench.experiment.Experiment`. Results are the same
bit for bit whichever does.
"""

from infssm.bench.executors.executor import Executor, Finished, InProcess, StoppedError, Watch, gather, results
from infssm.bench.executors.local import LocalProcesses
from infssm.bench.executors.ray import RayExecutor
from infssm.bench.executors.schedule import LostError
from infssm.bench.experiment import Experiment, make_plan

__all__ = [
    "Executor",
    "Experiment",
    "Finished",
    "InProcess",
    "LocalProcesses",
    "LostError",
    "RayExecutor",
    "StoppedError",
    "Watch",
    "gather",
    "make_plan",
    "results",
]
