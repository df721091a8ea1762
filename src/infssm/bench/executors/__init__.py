"""Plans of runs, and where they are carried out: here, in several processes of this machine, on a Ray cluster.

A plan is a list of :class:`Job`; an :class:`Executor` carries it out. Results are the same bit for bit whichever does.
"""

from infssm.bench.executors.in_process import InProcess
from infssm.bench.executors.job import Executor, Finished, Job, StoppedError, Watch, gather, results
from infssm.bench.executors.local import LocalProcesses
from infssm.bench.executors.ray import RayExecutor
from infssm.bench.executors.schedule import LostError
from infssm.bench.executors.sharing import can_share, first_task_key, make_plan, share_first_task, trains_plainly

__all__ = [
    "Executor",
    "Finished",
    "InProcess",
    "Job",
    "LocalProcesses",
    "LostError",
    "RayExecutor",
    "StoppedError",
    "Watch",
    "can_share",
    "first_task_key",
    "gather",
    "make_plan",
    "results",
    "share_first_task",
    "trains_plainly",
]
