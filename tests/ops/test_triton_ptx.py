"""Every Triton kernel compiles for a GPU, with the arguments the operators pass: the interpreter checks no types."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ops.test_triton import needs_triton

pytestmark = needs_triton

# Bytes of shared memory that a block has on every GPU since sm_86; sm_80 and sm_90 have more.
SHARED = 99 * 1024

# Runs the public functions on CPU tensors with a launch that compiles instead; what they return is left uninitialised.
COMPILE = """
import json, torch, triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from infssm.ops import (
    ScanInputs, backend, add_rms_norm, causal_conv1d, fused_distance, mean_states, scan_ssd, selective_scan, ssd
)

compiled = {}

def run(kernel, programs, like, *records, warps):
    named = {name: value for record in records for name, value in record.items()}
    values = {name: named[name] for name in kernel.arg_names}
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    fixed = {name: value for name, value in values.items() if value is None or name in constants}
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", int: "i32", float: "fp32"}
    kinds = {name: getattr(value, "dtype", type(value)) for name, value in values.items()}
    signature = {name: "constexpr" if name in fixed else types[kinds[name]] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__} {sorted(fixed.items())}"
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if name not in compiled:
        binary = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        compiled[name] = ".entry" in binary.asm["ptx"], binary.metadata.shared

backend._INTERPRETED = True
for name in ("conv", "distance", "norm", "scan", "ssd", "states"):
    import_module(f"infssm.ops.triton.{name}").run = run

def leaf(*shape):
    return torch.rand(*shape, requires_grad=True)

def pull(result):
    parts = [t for part in result for t in (part if isinstance(part, tuple) else (part,)) if t is not None]
    torch.autograd.backward(parts, [torch.ones_like(t) for t in parts])

u, delta, z = (leaf(2, 9, 64) for _ in range(3))
A, B, C, D, bias, initial = leaf(64, 16), leaf(2, 9, 16), leaf(2, 9, 16), leaf(64), leaf(64), leaf(2, 64, 16)
options = {"backend": "triton"}
pull([selective_scan(u, delta, A, B, C, **options)])
seq = torch.zeros(2, 9)
pull(selective_scan(u, delta, A, B, C, D, z, bias, True, True, initial, True, "zoh", seq_idx=seq, **options))
pull(mean_states(delta, A, delta_bias=bias, delta_softplus=True, zoh=True, **options))
pull([causal_conv1d(u, leaf(64, 4), bias, **options)])
pull([causal_conv1d(u, leaf(64, 4), bias, seq_idx=seq, **options)])
pull(add_rms_norm(u, z, D, eps=1e-5, **options))
old, new = [torch.rand(5, 16) for _ in range(3)], [leaf(5, 16) for _ in range(3)]
for kind in ("simplified", "aligned", "martin"):
    pull([fused_distance(*new[:2], *new[1:], kind=kind, **options)])
pull([fused_distance(*old[:2], *new[:2], kind="output", old_b=old[2], new_b=new[2], **options)])

ssd.choose = lambda *_: "triton"
for dtype, tokens in ((torch.float32, 70), (torch.bfloat16, 16)):  # whole tiles, and small ones, which compile fast
    u, delta, B, C, z = (leaf(1, tokens, size).to(dtype) for size in (128, 2, 128, 128, 128))
    seq = None if dtype == torch.float32 else torch.zeros(1, tokens)
    pull(scan_ssd(ScanInputs(u, delta, leaf(2), B, C, leaf(2), z, leaf(2), True, seq_idx=seq))[:1])
print(json.dumps(compiled))
"""


def test_every_kernel_compiles_to_ptx(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = json.loads(run.stdout)
    assert all(is_ptx for is_ptx, _ in compiled.values())
    assert {name: shared for name, (_, shared) in compiled.items() if shared > SHARED} == {}
    kernels = sorted(name.partition(" ")[0] for name in compiled)
    assert kernels == [
        *(*["conv.backward"] * 2, *["conv.forward"] * 4, "distance.gram", "distance.gram", "distance.martin"),
        *("distance.output", "norm.backward", "norm.forward", "scan.forward", "scan.forward"),
        *("scan_backward.backward", "scan_backward.backward"),
        *(*["ssd.carry"] * 2, *["ssd.chunk_states"] * 4, *["ssd.outputs"] * 2, *["ssd.similarities"] * 2),
        *(*["ssd_backward.gate"] * 2, *["ssd_backward.inputs"] * 2, *["ssd_backward.projections"] * 2),
        *("states.backward", "states.forward"),
    ]
