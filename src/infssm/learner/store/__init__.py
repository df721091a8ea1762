"""The folder that a run or a learner is kept in: names, checksums, lock, what can be packed and moved."""

from infssm.learner.devices import commit_of, environment
from infssm.learner.store.directory import RunDirectory, find_runs
from infssm.learner.store.layout import read_checked

__all__ = ["RunDirectory", "commit_of", "environment", "find_runs", "read_checked"]
