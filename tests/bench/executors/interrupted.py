"""Carries out two runs in processes whose fork server is sent Ctrl-C while it imports what it preloads."""

import os
import signal
import sys
from pathlib import Path

if __name__ != "__main__":  # in the fork server
    os.kill(os.getpid(), signal.SIGINT)
else:
    from infssm.bench.executors import LocalProcesses, gather, local, make_plan, results
    from tests.learner.tiny import tiny_config

    local._PRELOADED = "tests.bench.executors.interrupted"
    jobs = make_plan(tiny_config(Path(sys.argv[1]), seed=seed) for seed in (0, 1))
    assert len(results(gather(LocalProcesses(2), jobs, quiet=True))) == 2
