"""``python -m tests.fuzz [NAME...] --count N --seed S``: one line per fuzzer; exit code 1 where a case failed."""

import argparse
import importlib
import sys
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if not path.stem.startswith("_") and not path.stem.startswith("test_")
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all unless given")
    parser.add_argument("--count", type=int, default=1000, help="cases of each fuzzer")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    return max(_run(name, arguments.count, arguments.seed) for name in arguments.names or NAMES)


def _run(name: str, count: int, seed: int) -> int:
    try:
        importlib.import_module(f"tests.fuzz.{name}").run(count, seed)
    except AssertionError as error:
        sys.stdout.write(f"{name} FAILED\n{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
