"""Plans of runs, and where they are carried out: here, in several processes of this machine, on a Ray cluster.

A plan is a list of :class:`Job`; an :class:`Executor` carries it out. Results are the same bit for bit whichever does.
"""

from infssm.executors._in_process import InProcess
from infssm.executors._job import Executor, Finished, Job, StoppedError, Watch, gather, results
from infssm.executors._local import LocalProcesses
from infssm.executors._ray import RayExecutor
from infssm.executors._schedule import LostError
from infssm.executors._sharing import can_share, first_task_key, make_plan, share_first_task, trains_plainly

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
