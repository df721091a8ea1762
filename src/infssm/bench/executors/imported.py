"""Preloaded by the fork server so that worker processes start quickly: what a run imports."""

import contextlib
import importlib

for _name in ("infssm.bench.executors.local", "lightning_fabric", "sklearn.datasets"):
    with contextlib.suppress(Exception):  # an error would end the fork server, and hang the process that waits for it
        importlib.import_module(_name)
