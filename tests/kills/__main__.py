"""``python -m tests.kills --count N --seed S``: what N random SIGKILLs of learn, forget and undo left behind."""

import argparse
import sys

from tests.kills import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for outcome, number in sorted(run(arguments.count, arguments.seed).items()):
        sys.stdout.write(f"{number:5d}  {outcome}\n")
