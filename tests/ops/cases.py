"""Scan inputs to test with, and how far two results may be apart."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

OPTIONAL = ("D", "z", "delta_bias", "initial_state")
PACKED = "seq_idx"  # an option too: several sequences per row


@dataclass(frozen=True)
class ScanCase:
    batch: int
    tokens: int
    channels: int
    n: int
    groups: int | None = None
    reverse: bool = False
    softplus: bool = True
    options: frozenset[str] = field(default_factory=frozenset)
    states: bool | str = True
    scalar: bool = False
    seed: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Inputs in float32."""
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        shape = (self.batch, self.tokens, self.channels)
        rows = (self.batch, self.tokens) + (() if self.groups is None else (self.groups,)) + (self.n,)
        delta = randn(*shape)
        A = -4 * torch.rand(self.channels, 1 if self.scalar else self.n, generator=g)
        result = {
            "u": randn(*shape),
            "delta": delta - 1 if self.softplus else 0.3 * delta.abs(),
            "A": A.expand(self.channels, self.n),
            "B": randn(*rows),
            "C": randn(*rows),
        }
        shapes = {"D": (self.channels,), "z": shape, "delta_bias": (self.channels,)}
        shapes["initial_state"] = (self.batch, self.channels, self.n)
        for name in OPTIONAL:
            if name in self.options:
                value = randn(*shapes[name])
                result[name] = value if self.softplus or name != "delta_bias" else 0.1 * value.abs()
        if PACKED in self.options:
            result[PACKED] = (torch.rand(self.batch, self.tokens, generator=g) < 0.2).cumsum(1)
        return result

    def settings(self) -> dict[str, object]:
        """Options that are not tensors; everything is returned."""
        return {
            "delta_softplus": self.softplus,
            "reverse": self.reverse,
            "return_last_state": True,
            "return_states": self.states,
        }


def scan_cases() -> st.SearchStrategy[ScanCase]:
    """Shapes and options of the whole range."""

    def channels_of(groups: int | None, channels: int) -> int:
        return channels if groups is None else groups * max(1, channels // groups)

    return st.builds(
        lambda groups, channels, **rest: ScanCase(groups=groups, channels=channels_of(groups, channels), **rest),
        batch=st.integers(1, 3),
        tokens=st.integers(1, 300),
        channels=st.integers(1, 97),
        n=st.integers(1, 64),
        groups=st.sampled_from([None, None, 1, 2, 3]),
        reverse=st.booleans(),
        softplus=st.booleans(),
        options=st.frozensets(st.sampled_from((*OPTIONAL, PACKED))),
        states=st.sampled_from([False, True, "zoh"]),
        scalar=st.booleans(),
        seed=st.integers(0, 2**16),
    )


def flatten(result: object) -> list[Tensor]:
    """All tensors of a (nested) result."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in flatten(part)]


def run_with_gradients(function, tensors, dtype, weights=None, **settings):
    """Outputs, gradients by input name, and the random weights of the scalar that was differentiated."""
    fixed = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
    floats = {name: tensor for name, tensor in tensors.items() if name not in fixed}
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in floats.items()}
    outputs = flatten(function(**leaves, **fixed, **settings))
    if weights is None:
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(output.shape, generator=g) for output in outputs]
    loss = sum((output * weight.to(dtype)).sum() for output, weight in zip(outputs, weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return [output.detach() for output in outputs], named, weights


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Largest difference relative to the largest expected value."""
    assert actual.shape == expected.shape, what
    scale = expected.abs().max().clamp_min(1e-6)
    error = ((actual.double() - expected.double()).abs().max() / scale).item()
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


def assert_equivalent(function, tensors, *, backend, values=1e-5, gradients=1e-4, **settings) -> None:
    """`backend` in float32 equals the reference in float64, values and gradients."""
    exact, exact_grads, weights = run_with_gradients(function, tensors, torch.float64, backend="reference", **settings)
    outputs, grads, _ = run_with_gradients(function, tensors, torch.float32, weights, backend=backend, **settings)
    for i, (output, expected) in enumerate(zip(outputs, exact, strict=True)):
        assert_near(output, expected, values, f"output {i}")
    assert grads.keys() >= exact_grads.keys()
    for name, expected in exact_grads.items():
        assert_near(grads[name], expected, gradients, f"gradient of {name}")
