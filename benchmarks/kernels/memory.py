"""Peak memory of one job, run as a process: `python -m benchmarks.kernels.memory JOB` prints MiB above the inputs."""

from __future__ import annotations

import sys

from benchmarks.kernels.distances import DistanceProblem, joint_gram
from benchmarks.kernels.scans import ScanProblem

SCAN = (4, 197, 768, 16)
TOKENS = 128 * 197

SCAN_JOBS = {
    "ours": lambda p: p.backward(p.ours),
    "ours with states": lambda p: p.with_states(),
    "ours, states outside": lambda p: p.states_outside(),
    "reference": lambda p: p.backward(lambda: p.ours("reference")),
    "mambapy": lambda p: p.backward(p.mambapy),
    "transformers": lambda p: p.backward(lambda: p.transformers(True)),
}
DISTANCE_JOBS = {
    "simplified": lambda p: p.ours("simplified"),
    "2n x 2n Gram": lambda p: p.formula(joint_gram),
}


def resident(field: str) -> float:
    """MiB of /proc/self/status: VmRSS now, VmHWM at most (getrusage would count the parent's, from before exec)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def main(job: str) -> None:
    scan = job in SCAN_JOBS
    run = SCAN_JOBS[job] if scan else DISTANCE_JOBS[job]
    run(ScanProblem(1, 16, 32, 16) if scan else DistanceProblem(64, 16))  # load everything
    problem = ScanProblem(*SCAN) if scan else DistanceProblem(TOKENS, 16)
    before = resident("VmRSS")
    run(problem)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1])
