"""Imported by the process that processes for runs are forked from: what a run imports, so that each need not."""

import contextlib
import importlib

for _name in ("infssm.bench.executors.local", "lightning_fabric", "sklearn.datasets"):
    with contextlib.suppress(Exception):  # here an error would end that process, and the one that waits for it hang
        importlib.import_module(_name)
