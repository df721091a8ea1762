"""The operators inside PyTorch: torch.compile, opcheck, double use, memory, the report and the choice of backend."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops import (
    ScanInputs,
    add_rms_norm,
    backend_report,
    causal_conv1d,
    fused_distance,
    mean_states,
    selective_scan,
)
from infssm.ops.backend import NATIVE, choose
from tests.ops.cases import OPTIONAL, ScanCase, assert_near
from tests.ops.test_directions import joined, problem

_ops = torch.ops.infssm

NATIVE_BACKENDS = ["reference"] if NATIVE is None else ["reference", "cpu"]


def block(x: dict[str, torch.Tensor], weight: torch.Tensor, backend: str) -> torch.Tensor:
    """Every operation once, the scan twice with shared inputs."""
    u = causal_conv1d(x["u"], weight, x["D"], backend=backend)
    inputs = {**x, "u": u}
    y, states = selective_scan(**inputs, delta_softplus=True, return_states=True, backend=backend)
    back = selective_scan(**inputs, delta_softplus=True, reverse=True, backend=backend)
    normed, total = add_rms_norm(y, back, x["D"], eps=1e-5, backend=backend)
    old = 0.9 * states.a.detach(), x["C"].detach()
    penalty = fused_distance(*old, states.a, x["C"], kind="aligned", backend=backend)
    zoh = mean_states(x["delta"], x["A"], zoh=True, backend=backend).zoh
    return normed.sum() + total.square().mean() + penalty.sum() + zoh.sum()


@pytest.mark.parametrize("backend", NATIVE_BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_as_one_graph(backend: str) -> None:
    x = {k: v.requires_grad_() for k, v in ScanCase(2, 5, 6, 3, options=frozenset(OPTIONAL)).tensors().items()}
    weight = torch.randn(6, 4, requires_grad=True)
    leaves = [*x.values(), weight]
    expected = block(x, weight, backend)
    expected_grads = torch.autograd.grad(expected, leaves)
    actual = torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight, backend)
    assert_near(actual, expected, 1e-5, "compiled")
    for left, right in zip(torch.autograd.grad(actual, leaves), expected_grads, strict=True):
        assert_near(left, right, 1e-4, "compiled gradient")


def states(like: torch.Tensor, needs_grad: bool) -> list[torch.Tensor]:
    """Tensors that differ a little from the given one."""
    return [(like.detach() + 0.1 * k).requires_grad_(needs_grad) for k in range(4)]


def operators() -> list[tuple[object, tuple[object, ...]]]:
    """Each operator with arguments, some of which need gradients."""
    x = {
        k: v.requires_grad_() for k, v in ScanCase(2, 5, 6, 3, groups=2, options=frozenset(OPTIONAL)).tensors().items()
    }
    seq_idx = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2.0]])
    full = ScanInputs(**x, delta_softplus=True, reverse=True, seq_idx=seq_idx)
    bare = ScanInputs(*full[:5])
    c = torch.randn(4, 3, requires_grad=True)
    by_head = [(-torch.rand(6)).requires_grad_() for _ in range(3)]  # every channel a head
    unused = {"reverse": False, "initial_state": None}  # by the scan of heads in chunks
    xz, ways = problem(2, 5, 6, 2, 3)
    heads = [(-torch.rand(2)).requires_grad_() for _ in range(3)]
    conv = [torch.randn(10, 1, 4, requires_grad=True), torch.randn(10, requires_grad=True)]
    return [
        (_ops.directions, (xz, [False, True], 0.5, True, True, joined(ways))),
        (_ops.ssd_layer, (torch.randn(2, 5, 16, requires_grad=True), *conv, *heads, 4, 1, True)),
        (_ops.scan, (*full, True, 2, True, False)),
        (_ops.scan, (*bare, False, 0, True, False)),
        (_ops.ssd, (*full._replace(A=by_head[0], D=by_head[1], delta_bias=by_head[2], **unused), True, False)),
        (_ops.mean_states, (x["delta"], x["A"], x["delta_bias"], 2, True, True, False)),
        (_ops.conv, (x["u"], torch.randn(6, 4, requires_grad=True), x["D"], True, True, full.seq_idx, False)),
        (_ops.norm, (x["u"], x["z"], x["D"], 1e-5, False)),
        (_ops.norm, (x["u"], None, x["D"], 1e-5, False)),
        *(
            (_ops.distance, (*states(c, to_old)[:2], *states(c, True), kind, True, to_old, True, False))
            for kind, to_old in (("aligned", False), ("output", True))
        ),
        (
            _ops.distance,
            (*states(c, False)[:2], *states(c, True)[:2], *(None,) * 2, "simplified", True, False, True, False),
        ),
    ]


def test_operators_pass_opcheck() -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if NATIVE is None:  # the schema and the registration stand without a kernel; the rest runs one
        tests = ["test_autograd_registration"]
    for operator, arguments in operators():
        result = torch.library.opcheck(operator, arguments, test_utils=tests)
        assert set(result.values()) == {"SUCCESS"}


def refuses(operator, arguments) -> bool:
    try:
        operator(*arguments)
    except (ConfigError, ValueError) as error:
        return re.search("has shape|dimensions|cannot be split|is missing", str(error)) is not None
    return False


def test_wrong_shapes_are_refused() -> None:
    """Called directly, not through the functions that check first: no operator reads out of bounds."""
    for operator, arguments in operators() if NATIVE is not None else []:
        for place, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                # One of the two may be a shape that fits, such as fewer taps of a convolution.
                few = [argument.detach()[..., :1], argument.detach()[:1]]
                assert any(refuses(operator, (*arguments[:place], one, *arguments[place + 1 :])) for one in few), place


MEASURE = """
import json, sys, torch
from infssm.ops import selective_scan
torch.manual_seed(0)
batch, tokens, channels, n = int(sys.argv[2]), 1024, 512, 16
u, delta, z = (torch.randn(batch, tokens, channels, requires_grad=True) for _ in range(3))
A = (-torch.rand(channels, n)).requires_grad_()
B, C = (torch.randn(batch, tokens, n, requires_grad=True) for _ in range(2))
inputs = [u, delta, A, B, C]
selective_scan(*(t[:1, :8] if t.dim() == 3 else t for t in inputs), z=z[:1, :8], backend=sys.argv[1]).sum().backward()
for t in (*inputs, z): t.grad = torch.zeros_like(t)
grad = torch.ones(batch, tokens, channels)
y = torch.zeros_like(grad)
def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024
before = resident("VmRSS")
out = selective_scan(*inputs, z=z, delta_softplus=True, return_states=True, backend=sys.argv[1])
grads = torch.autograd.grad([out[0], out[1].a], [*inputs, z], [grad, torch.ones_like(out[1].a)])
kept = sum(t.numel() * 4 for t in (out[0], out[1].a, *grads)) / 2**20
print(json.dumps({"above": resident("VmHWM") - before - kept, "largest": batch * tokens * channels * n * 4 / 2**20}))
"""


@pytest.mark.parametrize("backend", NATIVE_BACKENDS)
def test_never_holds_all_states_at_once(backend: str) -> None:
    # Freed memory goes back at once, so that what is measured is what is held, not what the allocator keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    batch = 8 if backend == "cpu" else 4  # the reference is slow
    command = [sys.executable, "-c", MEASURE, backend, str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    memory = json.loads(run.stdout)
    assert memory["above"] < 80 < memory["largest"], memory


def test_report_names_what_runs() -> None:
    report = backend_report()
    assert report["native"] == (NATIVE is not None)
    assert report["default"] == choose(None, torch.zeros(1))
    if NATIVE is not None:
        assert report["isa"] in report["isas"]
        assert "baseline" in report["isas"]


def test_choice_of_backend() -> None:
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    assert choose("reference", single) == "reference"
    assert choose(None, single, double) == "reference"
    assert (choose(None, single, None, single.bfloat16()) == "cpu") == (NATIVE is not None)
    with pytest.raises(ConfigError, match="is not one of"):
        choose("gpu", single)
    with pytest.raises(ConfigError, match="float64" if NATIVE is not None else "was not built"):
        choose("cpu", double)


def test_unknown_instruction_set_is_named() -> None:
    code = "import infssm.ops as k; print(k.backend_report()['isa'])"
    if NATIVE is None:
        code = "import infssm.ops as k; print('baseline')"
    environment = os.environ | {"INFSSM_ISA": "baseline"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == "baseline"
    if NATIVE is not None:
        with pytest.raises(ValueError, match="vax"):
            NATIVE.use_isa("vax")
