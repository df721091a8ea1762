"""Recording in every situation people train in: several forwards, checkpoints, autocast, DDP, compile, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from infssm.errors import ConfigError
from infssm.methods import attach
from infssm.models import create_model
from infssm.ssm import OldModel, Recorder, StateSpace, find_mixers, record_states
from tests.compare import assert_rounding, identical
from tests.ssm import hf

OURS: dict[str, dict[str, Any]] = {
    "vim_nano": {"img_size": 8, "patch_size": 4, "depth": 3, "embed_dim": 16},
    "mamba_nano": {"d_model": 8, "n_layer": 3, "in_dim": 3},
    "mamba2_nano": {"d_model": 8, "n_layer": 3, "in_dim": 3, "headdim": 4, "ngroups": 2, "d_state": 4},
    "s4d_nano": {"d_model": 8, "n_layer": 3, "in_dim": 3, "d_state": 4},
    "vmamba_nano": {},
}


class Case:
    """A model, and how to run it on one of several inputs."""

    def __init__(self, name: str, model: str = "vim_nano") -> None:
        self.name = name
        torch.manual_seed(0)
        if name == "ours":
            self.model: Any = create_model(model, num_classes=5, **OURS[model])
        else:
            self.model = hf.make("mamba")
        self.shape = (2, 3, 8, 8) if model in ("vim_nano", "vmamba_nano") else (2, 7, 3)

    def run(self, seed: int = 0, model: nn.Module | None = None) -> Tensor:
        model = self.model if model is None else model
        if self.name == "ours":
            return model(torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)))
        return model(input_ids=hf.tokens(seed=seed), use_cache=False).logits

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers if self.name == "ours" else self.model.backbone.layers

    def wrap_blocks(self, use_reentrant: bool) -> None:
        """Run every block under a gradient checkpoint."""
        for block in find_mixers(self.model).values() if self.name == "ours" else self.blocks:
            block.forward = _checkpointed(block.forward, use_reentrant)


def _checkpointed(forward: Callable[..., Any], use_reentrant: bool) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(
        _call, forward, args, kwargs, *_tensors(args), use_reentrant=use_reentrant
    )


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def _call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *tensors: Tensor) -> Any:
    given = iter(tensors)
    return forward(*(next(given) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)


@pytest.fixture(params=["ours", "foreign"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def loss_of(logits: Tensor, states: list[StateSpace]) -> Tensor:
    tensors = [torch.view_as_real(t) if t.is_complex() else t for s in states for t in (s.a, s.c, s.b)]
    terms = [(t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in tensors]
    return torch.stack([term.double() for term in [logits.square().mean(), *terms]]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: list[StateSpace], b: list[StateSpace]) -> bool:
    return all(identical(x.a, y.a) and identical(x.c, y.c) and identical(x.b, y.b) for x, y in zip(a, b, strict=True))


def assert_equal_to_rounding(a: list[StateSpace], b: list[StateSpace]) -> None:
    for x, y in zip(a, b, strict=True):
        for left, right in ((x.a, y.a), (x.c, y.c), (x.b, y.b)):
            assert_rounding(left, right)


def installed(model: nn.Module) -> int:
    return sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) + (getattr(m, "tap", None) is not None)
        for m in model.modules()
    )


def test_outputs_are_unchanged_and_nothing_stays_installed(case: Case) -> None:
    expected = case.run()
    recorder = Recorder(case.model)
    assert installed(case.model) == 0
    with recorder.recording():
        assert installed(case.model) == len(recorder.names) > 0
        assert_rounding(case.run(), expected)
    assert installed(case.model) == 0
    assert list(recorder.states) == recorder.names


def test_states_belong_to_the_last_forward(case: Case) -> None:
    recorder = Recorder(case.model)
    with recorder.recording():
        case.run(seed=0)
        first = recorder.flat()
        case.run(seed=1)
        second = recorder.flat()
    assert len(first) == len(second)
    assert not same(first, second)
    with record_states(case.model) as states:
        case.run(seed=1)
    assert same(states.flat(), second)
    loss_of(torch.zeros(1), first).backward()  # the first forward's graph is still whole


def test_a_forward_that_fails_half_way_leaves_no_trace(case: Case) -> None:
    recorder = Recorder(case.model)
    last = case.blocks[-1]
    with recorder.recording():
        handle = last.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            case.run(seed=3)
        handle.remove()
        case.run(seed=1)
        got = recorder.flat()
    with record_states(case.model) as states:
        case.run(seed=1)
    assert same(got, states.flat())
    assert installed(case.model) == 0


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_before_any_forward_the_error_says_what_to_do(case: Case) -> None:
    recorder = Recorder(case.model)
    with pytest.raises(ConfigError, match=r"recorder\.recording"):
        recorder.flat()
    with record_states(case.model) as states:
        assert len(states) == 0
        assert list(states) == []


def test_nested_recording_is_an_error_and_does_not_break_the_outer_one(case: Case) -> None:
    recorder = Recorder(case.model, layers=1)
    with record_states(case.model) as states:
        with pytest.raises(ConfigError, match="being recorded already"), recorder.recording():
            pass
        case.run()
    assert len(states) > 1
    with recorder.recording():
        case.run()
    assert len(recorder.states) == 1


@pytest.mark.parametrize("include_dt_bias", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("model", [*OURS, "foreign"])
def test_checkpointing_changes_neither_states_nor_gradients(
    model: str, backward_inside: bool, include_dt_bias: bool
) -> None:
    case = Case("foreign") if model == "foreign" else Case("ours", model)
    recorder = Recorder(case.model, include_dt_bias=include_dt_bias, b_mode="euler")
    with recorder.recording():
        loss_of(case.run(), recorder_flat_after(case, recorder)).backward()
    expected_states, expected = recorder.flat(), gradients(case.model)
    case.model.zero_grad()
    case.wrap_blocks(use_reentrant=False)
    replay = case.run(seed=5)  # a checkpointed forward before the recorded one, not recorded itself
    with recorder.recording():
        logits = case.run()
        states = recorder.flat()
        loss = loss_of(logits, states) + 0.0 * replay.sum()
        if backward_inside:
            loss.backward()
            assert same(recorder.flat(), states)
    if not backward_inside:
        loss.backward()
    assert_equal_to_rounding(states, expected_states)
    for name, gradient in gradients(case.model).items():
        assert_rounding(gradient, expected[name])


def recorder_flat_after(case: Case, recorder: Recorder) -> list[StateSpace]:
    case.run()
    return recorder.flat()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_reentrant_checkpointing_is_refused_with_the_fix(case: Case) -> None:
    case.wrap_blocks(use_reentrant=True)
    with record_states(case.model), pytest.raises(ConfigError, match="use_reentrant=False"):
        case.run()
    with torch.no_grad(), record_states(case.model) as states:  # no gradient expected: nothing to refuse
        case.run()
    assert len(states.flat()) > 0


def test_states_are_float32_under_autocast_and_for_half_models(case: Case) -> None:
    with record_states(case.model) as exact:
        case.run()
    with torch.autocast("cpu", dtype=torch.bfloat16), record_states(case.model, b_mode="zoh") as states:
        case.run()
    for got, want in zip(states.flat(), exact.flat(), strict=True):
        assert {got.a.dtype, got.c.dtype, got.b.dtype} == {torch.float32}
        torch.testing.assert_close(got.a, want.a, rtol=0.1, atol=0.05)
    loss_of(torch.zeros(1), states.flat()).backward()
    assert gradients(case.model)


def test_half_precision_weights_give_float32_states() -> None:
    case = Case("foreign")
    case.model.bfloat16()
    with record_states(case.model) as states:
        case.run()
    assert {t.dtype for s in states.flat() for t in (s.a, s.b, s.c)} == {torch.float32}


def test_double_models_keep_their_precision(case: Case) -> None:
    case.model.double()
    with record_states(case.model) as states:
        if case.name == "ours":
            case.model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
        else:
            case.run()
    assert {t.dtype for s in states.flat() for t in (s.a, s.b, s.c)} == {torch.float64}


def test_dt_bias_is_left_out_when_asked(case: Case) -> None:
    with record_states(case.model, include_dt_bias=False) as without, torch.no_grad():
        case.run()
    with torch.no_grad():
        for name, parameter in case.blocks[0].named_parameters():
            if "dt_proj" in name and name.endswith("bias"):
                parameter.zero_()
    with record_states(case.model) as zeroed, torch.no_grad():
        case.run()
    first = next(iter(without))
    for got, want in zip(without[first], zeroed[first], strict=True):
        torch.testing.assert_close(got.a, want.a)
        torch.testing.assert_close(got.c, want.c)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_model_can_be_copied_while_it_is_recorded(case: Case, clone: Callable[[Any], Any]) -> None:
    with record_states(case.model) as states:
        case.run()
        before = states.flat()
        twin = clone(case.model)
        case.run(seed=1, model=twin)
        assert same(states.flat(), before)
        with record_states(twin) as twin_states:
            case.run(model=twin)
    for got, want in zip(twin_states.flat(), before, strict=True):
        torch.testing.assert_close(got.a, want.a)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(case: Case) -> None:
    recorder = Recorder(case.model)
    with recorder.recording():
        logits = case.run()
    loss_of(logits, recorder.flat()).backward()
    expected_states, expected = recorder.flat(), gradients(case.model)
    case.model.zero_grad()
    wrapped = DistributedDataParallel(case.model)
    parallel = Recorder(wrapped)
    assert parallel.names == recorder.names
    with parallel.recording():
        logits = case.run(model=wrapped)
    loss_of(logits, parallel.flat()).backward()
    assert_equal_to_rounding(parallel.flat(), expected_states)
    for name, gradient in gradients(case.model).items():
        torch.testing.assert_close(gradient, expected[name])
    old = OldModel(wrapped)
    assert type(old.module) is type(case.model)
    assert list(old.state_dict()) == list(case.model.state_dict())


# torch's own compiler looks at .grad of whatever tensor a graph break hands over.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_compiled_wrapper_of_our_models() -> None:
    case = Case("ours")
    case.model.layers = case.model.layers[:1]
    with record_states(case.model) as expected:
        case.run()
    compiled = torch.compile(case.model, backend="eager")
    case.run(model=compiled)
    recorder = Recorder(compiled)
    assert recorder.names == list(expected)
    with recorder.recording():
        logits = case.run(model=compiled)
    assert_equal_to_rounding(recorder.flat(), expected.flat())
    loss_of(logits, recorder.flat()).backward()
    assert gradients(case.model)


def test_inference_mode(case: Case) -> None:
    with torch.inference_mode(), record_states(case.model) as states:
        case.run()
    assert not states.flat()[0].a.requires_grad


@pytest.mark.parametrize("name", ["lwf-ac", "lwf", "lwf-f"])
def test_a_forward_without_gradient_before_the_penalty_is_refused(name: str) -> None:
    model = create_model("vim_nano", num_classes=4, img_size=8, patch_size=4, in_chans=1, depth=1, embed_dim=16)
    method = attach(model, name)
    method.begin_task(1)
    x = torch.randn(2, 1, 8, 8)
    model(x)
    with torch.no_grad():
        model(x)
    with pytest.raises(ConfigError, match=r"ran under torch\.no_grad"):
        method.penalty(x)
    with torch.no_grad():  # a penalty that is only looked at
        model(x)
        assert not method.penalty(x).requires_grad
    model(x)
    assert method.penalty(x).requires_grad
