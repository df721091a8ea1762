"""The same tests on the other machines that users have, as far as this one can stand in for them.

A cell is a part of the suite under other conditions: the numerical packages with the oldest instruction set (and
with AVX2, where this machine has more); the package installed without a compiler, where plain PyTorch serves; and, only
when asked for, the compiled kernels under the address and undefined-behaviour sanitizers, and the wheel that
`make wheels` built.
`python -m tests.cells` runs those of `make test`, `python -m tests.cells NAME...` the named ones.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from infssm.ops.backend import NATIVE

ROOT = Path(__file__).resolve().parent.parent
NUMERICAL = [f"tests/{name}" for name in ("ops", "ssm", "models", "methods")]
KERNELS = ["tests/ops", "tests/ssm"]
# Triton's interpreter computes in numpy, whatever the instruction set of the others is. Tests with several processes
# check what these exchange.
LEFT_OUT = ("triton", "processes", "gathering", "distributed")
PYTEST = ("-m", "pytest", "-q", *(f"--ignore-glob=*test_{name}*" for name in LEFT_OUT))


def oldest() -> int:
    """The instruction set that every x86-64 machine has."""
    return pytest(
        sys.executable, NUMERICAL, INFSSM_ISA="baseline", ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE"
    )


def avx2() -> int:
    """AVX2, where this machine would take more by itself."""
    if NATIVE is None or NATIVE.isas()[0] in ("avx2", "baseline"):
        return 0
    # Instruction sets differ in the kernels and models; the methods above them ran on the oldest one.
    return pytest(sys.executable, [*KERNELS, "tests/models"], INFSSM_ISA="avx2", ATEN_CPU_CAPABILITY="avx2")


def no_compiler() -> int:
    """Installed where no compiler works: the reference serves, from the kernels to the command line."""
    python = installed("no-compiler", {"CC": "no-such-compiler", "CXX": "no-such-compiler"})
    found = "from infssm.ops.backend import NATIVE; raise SystemExit(NATIVE is not None)"
    subprocess.run([python, "-c", found], check=True, cwd=ROOT)
    return pytest(python, [*KERNELS, "tests/ssm/test_recorder.py", "tests/learner/test_loop.py"])


def sanitize() -> int:
    """Kernels and geometry with ASan and UBSan: a read out of bounds or an overflow ends the run."""
    compiler = shutil.which("g++") or sys.exit("the sanitizers are those of g++: install it")
    python = installed("sanitize", {"CXX": compiler}, "-Ccmake.define.INFSSM_SANITIZE=ON")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    # Python and torch keep memory to the end, so leaks are not looked for.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    # These count memory and start a process of their own: the sanitizer's share would be counted, or missing.
    left_out = ("test_never_holds_all_states_at_once", "test_unknown_instruction_set_is_named")
    paths = [*KERNELS, *(f"--deselect=tests/ops/test_operators.py::{name}" for name in left_out)]
    return pytest(python, paths, LD_PRELOAD=":".join(libraries), PYTHONMALLOC="malloc", **options)


def wheel() -> int:
    """What `make wheels` built, in an environment without a compiler: kernels, geometry and a run from nowhere."""
    built = sorted((ROOT / "dist").glob("infssm-*.whl"), key=lambda path: path.stat().st_mtime)
    if not built:
        sys.exit("there is no wheel in dist/: make wheels")
    python = environment("wheel")
    install(python, [str(built[-1])], {"CC": "no-such-compiler", "CXX": "no-such-compiler"})
    with tempfile.TemporaryDirectory() as empty:
        command = [python, "-m", "infssm", "run", "method=lwf-ac", "train.epochs=1", "train.limit_batches=2"]
        subprocess.run(command, cwd=empty, check=True)
    return pytest(python, [*KERNELS, "tests/learner/test_loop.py"])


CELLS: Mapping[str, Callable[[], int]] = {
    "oldest": oldest,
    "avx2": avx2,
    "no-compiler": no_compiler,
    "sanitize": sanitize,
    "wheel": wheel,
}
GATE = ("oldest", "avx2", "no-compiler")


def pytest(python: str, paths: list[str], **variables: str) -> int:
    """Run the tests under ``paths``, as many processes as cores; the exit code."""
    workers = ("-n", str(min(os.cpu_count() or 1, 8)))
    return subprocess.run(
        [python, *PYTEST, *workers, *paths], cwd=ROOT, env=os.environ | variables, check=False
    ).returncode


def installed(name: str, variables: Mapping[str, str], *options: str) -> str:
    """The interpreter of an environment of its own, into which this source tree was installed."""
    python = environment(name)
    build = f"-Cbuild-dir={ROOT / 'build' / 'cells' / name / 'build'}"
    install(python, ["--no-build-isolation", build, *options, str(ROOT)], variables)
    return python


def environment(name: str) -> str:
    """The interpreter of an environment of its own under build/, without infssm.

    Everything else is taken from the environment that runs this, so nothing is downloaded.
    """
    folder = ROOT / "build" / "cells" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return str(python)


def install(python: str, arguments: list[str], variables: Mapping[str, str]) -> None:
    """Install infssm into an environment, and nothing else."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    subprocess.run([*pip, *arguments], env=os.environ | dict(variables), check=True)


def main(names: list[str]) -> int:
    """Run the named cells; 1 if any failed."""
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        sys.exit(f"no cell {unknown[0]!r}; there are {', '.join(CELLS)}")
    failed = []
    for name in names or GATE:
        sys.stdout.write(f"\n--- cell {name}: {CELLS[name].__doc__}\n")
        sys.stdout.flush()
        if CELLS[name]():
            failed.append(name)
    sys.stdout.write(f"cells that failed: {', '.join(failed) or 'none'}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
