"""`compress`: a model with fewer states per layer, pruned by what each state adds to the output, then trained back.

A state is one term of the impulse response, so its share has a closed form: ``|c b|^2 / (1 - |a|^2)``, the energy of
what the output lacks without it. Of selective layers it is averaged over tokens and channels of calibration data,
because all channels share B and C; S4D's channels have systems of their own, and each keeps its own best states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models import Backbone, Mamba2Mixer, MambaMixer, S4DMixer, VimMixer, create_model
from infssm.models.selective import Direction
from infssm.ops import ScanInputs
from infssm.ssm.distances import distance
from infssm.ssm.hidden import hidden_states
from infssm.ssm.mixers import find_mixers, unwrap
from infssm.ssm.recorder import Recorder, logits_of, record_states
from infssm.ssm.space import StateSpace

Score = Literal["output", "last", "magnitude"]
_SELECTIVE = (MambaMixer, VimMixer)


def compress(
    model: nn.Module,
    *,
    data: Iterable[Any],
    states: int | None = None,
    share: float | None = None,
    score: Score = "output",
    steps: int = 100,
    rate: float = 1e-3,
    progress: Callable[[str], None] = lambda _: None,
) -> Backbone:
    """A copy of the model with fewer states per layer, as near to it as a few steps of training bring it.

    Each layer keeps the states with the largest score; the remaining C takes over what it can of the rest, by least
    squares (Mamba, Vim, S4D); then all parameters are trained for ``steps`` steps towards the model: its output
    distributions, and its states by the `output` distance, which compares systems of different sizes. No labels are
    needed. The result is a model as `create_model` builds it with ``d_state=states``: it saves, loads, trains, exports.

    Args:
        model: a Mamba, Vim, Mamba-2 or S4D model of infssm; it is not changed.
        data: batches of model input (a tensor or a mapping of keyword arguments), or of (input, anything). All are
            used to score states, and in turn for the steps.
        states: states per layer to keep.
        share: share of the states to keep, instead of ``states``.
        score: ``output``, the energy above; ``last``, ``|c b|^2 / (1 - |a|)^2`` (LAST, Gwak et al. 2024);
            ``magnitude``, the size of the weights that form B and C.
        steps: of training; 0 leaves the pruned model as it is.
        rate: Adam's learning rate.
        progress: called with a line of text before each stage.
    """
    source = unwrap(model)
    if not isinstance(source, Backbone) or source.model_name is None:
        raise ConfigError(
            f"compress: {type(source).__name__} was not built by infssm.create_model, so no smaller model can be built"
        )
    size = _check(source, states, share, score, steps)
    batches = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in data]
    if not batches:
        raise ConfigError("compress: data has no batch; give at least one to score the states on")
    training = source.training
    source.eval()
    try:
        progress("scoring states")
        keep, refits = _choose(source, size, batches, score)
        progress("pruning")
        small = _smaller(source, size, keep, refits)
        if steps:
            progress("training towards the model")
            _approach(source, small, batches, steps, rate)
    finally:
        source.train(training)
    return small.train(training)


def _check(model: Backbone, states: int | None, share: float | None, score: str, steps: int) -> int:
    """The number of states to keep; raises where the model or the options do not allow it."""
    if score not in ("output", "last", "magnitude"):
        raise ConfigError(f"compress: score={score!r}; choose 'output', 'last' or 'magnitude'")
    sizes = set()
    for name, mixer in find_mixers(model).items():
        if isinstance(mixer, S4DMixer):
            sizes.add(2 * mixer.kernel.C.shape[1])
        elif isinstance(mixer, (*_SELECTIVE, Mamba2Mixer)):
            sizes.add(mixer.d_state)
        else:
            raise ConfigError(f"compress: {name} is a {type(mixer).__name__}; Mamba, Vim, Mamba-2 and S4D are known")
    (n,) = sizes
    if steps < 0:
        raise ConfigError(f"compress: steps={steps}; give 0 or more")
    if (states is None) == (share is None):
        raise ConfigError("compress: give states or share, one of the two")
    found = states if states is not None else round(n * float(share or 0))
    if not 1 <= found < n:
        raise ConfigError(f"compress: {found} of {n} states; give a number from 1 to {n - 1}")
    if found % 2 and any(isinstance(mixer, S4DMixer) for mixer in find_mixers(model).values()):
        raise ConfigError(f"compress: S4D has pairs of states, so their number must be even; {found} is not")
    return found


def _call(model: Backbone, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def _ways(mixer: Any) -> list[Direction]:
    return mixer.directions() if isinstance(mixer, VimMixer) else [mixer.direction]


Kept = dict[str, list[Tensor]]
"""By mixer: the indices that are kept, one tensor per direction (Mamba-2: [groups, k]; S4D: [channels, k / 2])."""


def _choose(model: Backbone, size: int, batches: list[Any], score: Score) -> tuple[Kept, Kept]:
    """What every layer keeps, and how its C takes over the rest (selective layers: [k, n - k] per direction)."""
    mixers = find_mixers(model)
    sums: dict[str, list[_Sums]] = {name: [] for name in mixers}
    hooked = {name: mixer for name, mixer in mixers.items() if isinstance(mixer, _SELECTIVE)}
    rest = [name for name in mixers if name not in hooked]
    with torch.no_grad():
        for batch in batches:
            for name, layer in hooked.items():
                layer.scan_hook = _Counter(sums[name])
            try:
                with record_states(model, b_mode="euler", layers=rest) if rest else _nothing() as spaces:
                    _call(model, batch)
            finally:
                for layer in hooked.values():
                    layer.scan_hook = None
            for name in rest:
                if isinstance(mixers[name], Mamba2Mixer):
                    assert spaces is not None
                    _add_scalar(sums[name], spaces[name][0])
    keep: Kept = {}
    refits: Kept = {}
    for name, mixer in mixers.items():
        keep[name], refits[name] = [], []
        if isinstance(mixer, S4DMixer):
            keep[name].append(_best(_kernel_score(mixer, score), size // 2))
        elif isinstance(mixer, Mamba2Mixer):
            keep[name].append(
                _best(_weights_of_mamba2(mixer) if score == "magnitude" else sums[name][0].score(score), size)
            )
        else:
            for way, found in zip(_ways(mixer), sums[name], strict=True):
                chosen = _best(_weight_score(way) if score == "magnitude" else found.score(score), size)
                keep[name].append(chosen)
                refits[name].append(found.refit(chosen))
    return keep, refits


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Sums:
    """Sums over tokens of one scan direction.

    output, last: [..., n] scores. both: [n, n, n, n], sum over tokens of C_i C_j and the Gram of hidden states h_k h_l
    over channels: all that the least squares for C need.
    """

    def __init__(self) -> None:
        self.output: Tensor | float = 0.0
        self.last: Tensor | float = 0.0
        self.both: Tensor | float = 0.0

    def score(self, kind: Score) -> Tensor:
        found = self.output if kind == "output" else self.last
        assert isinstance(found, Tensor)
        return found

    def refit(self, keep: Tensor) -> Tensor:
        """P [k, n - k] such that C_keep + P C_rest reads from the kept states what comes nearest to all of them."""
        assert isinstance(self.both, Tensor)
        n = self.both.shape[0]
        rest = torch.tensor([i for i in range(n) if i not in set(keep.tolist())], device=keep.device)
        # Unknown P_ij multiplies C_j h_i, with i kept and j not; the target is sum_l C_l h_l over the rest l.
        c = self.both[rest][:, rest]  # [j, j', n, n]
        left = c[:, :, keep][:, :, :, keep].permute(2, 0, 3, 1).flatten(2).flatten(0, 1)  # [(i j), (i' j')]
        target = torch.stack([c[:, place][:, keep, index] for place, index in enumerate(rest.tolist())]).sum(0)
        right = target.mT.flatten()
        ridge = 1e-6 * left.diagonal().mean().clamp_min(torch.finfo(left.dtype).tiny)
        solved = torch.linalg.solve(left + ridge * torch.eye(len(left)).to(left), right)
        found: Tensor = solved.view(len(keep), len(rest))
        return found


class _Counter:
    """A hook on a mixer's scans: adds the directions of one forward to their sums."""

    def __init__(self, sums: list[_Sums]) -> None:
        self.sums, self.direction = sums, 0

    def __call__(self, x: ScanInputs) -> None:
        if self.direction == len(self.sums):
            self.sums.append(_Sums())
        found = self.sums[self.direction]
        self.direction += 1
        delta = x.delta if x.delta_bias is None else x.delta + x.delta_bias
        # A step size that underflows would make both scores 0 / 0.
        rate = (F.softplus(delta) if x.delta_softplus else delta).clamp_min(1e-12).unsqueeze(-1)
        exponent = rate * x.A  # [batch, tokens, channels, n]
        gain = ((x.B * x.C).unsqueeze(2) * rate).square()
        found.output = found.output + (gain / -torch.expm1(2 * exponent)).mean(2).sum((0, 1)).double()
        found.last = found.last + (gain / torch.expm1(exponent).square()).mean(2).sum((0, 1)).double()
        h = hidden_states(x).flatten(0, 1)
        gram, c = (h.mT @ h).double(), x.C.flatten(0, 1).double()
        found.both = found.both + torch.einsum("ti,tj,tkl->ijkl", c, c, gram)


def _add_scalar(sums: list[_Sums], space: StateSpace) -> None:
    """Scores of Mamba-2's states: a: [batch, tokens(, groups), 1]; b, c: [batch, tokens(, groups), n]."""
    if not sums:
        sums.append(_Sums())
    assert space.b is not None
    gain = (space.c * space.b).square()
    slow = (1 - space.a).clamp_min(torch.finfo(space.a.dtype).eps)  # a rounds to 1 where the step size is tiny
    output, last = gain / (slow * (1 + space.a)), gain / slow.square()
    if gain.ndim == 3:  # one group
        output, last = output.unsqueeze(2), last.unsqueeze(2)
    sums[0].output = sums[0].output + output.sum((0, 1)).double()
    sums[0].last = sums[0].last + last.sum((0, 1)).double()


def _kernel_score(mixer: S4DMixer, score: Score) -> Tensor:
    """[channels, n / 2]; the energies do not depend on data."""
    with torch.no_grad():
        a, factor = mixer.kernel.discretize()
        gain = (mixer.kernel.complex_c() * factor).abs().square()
        if score == "magnitude":
            return mixer.kernel.complex_c().abs()
        return gain / (1 - a.abs().square()) if score == "output" else gain / (1 - a.abs()).square()


def _weight_score(way: Direction) -> Tensor:
    _, b, c = torch.split(way.x_proj.weight.detach(), [way.dt_proj.in_features, *[way.A_log.shape[1]] * 2])
    return _lengths(b) * _lengths(c)


def _weights_of_mamba2(mixer: Mamba2Mixer) -> Tensor:
    start, width = 2 * mixer.d_inner, mixer.ngroups * mixer.d_state
    rows = _lengths(mixer.in_proj.weight.detach()[start : start + 2 * width])
    b, c = rows.view(2, mixer.ngroups, mixer.d_state).unbind(0)
    return b * c


def _lengths(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()


def _best(score: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the largest scores, in their old order."""
    return score.topk(k, dim=-1).indices.sort(dim=-1).values


def _smaller(model: Backbone, size: int, keep: Kept, refits: Kept) -> Backbone:
    """A model of that size with the kept states."""
    assert model.model_name is not None
    first = next(model.parameters())
    with torch.random.fork_rng(devices=[]):  # the weights are replaced: no random numbers of the caller are used
        small: Backbone = create_model(model.model_name, **{**model.saved_options(), "d_state": size})
    small.to(device=first.device, dtype=first.dtype)
    if "head" in dict(model.named_children()):  # a head that was fitted may be of another kind than a new model's
        small.head = copy.deepcopy(model.head)
    state = dict(model.state_dict())
    for name, mixer in find_mixers(model).items():
        if isinstance(mixer, S4DMixer):
            found = _pruned_s4d(mixer, keep[name][0])
        elif isinstance(mixer, Mamba2Mixer):
            found = _pruned_mamba2(mixer, keep[name][0])
        else:
            found = {}
            ends = ("", "_b") if isinstance(mixer, VimMixer) else ("",)
            for end, way, kept, refit in zip(ends, _ways(mixer), keep[name], refits[name], strict=True):
                found[f"A{end}_log"] = way.A_log.detach()[:, kept]
                found[f"x_proj{end}.weight"] = _pruned_rows(way, kept, refit)
        state |= {f"{name}.{key}": value for key, value in found.items()}
    small.load_state_dict(state)
    return small


def _pruned_rows(way: Direction, keep: Tensor, refit: Tensor) -> Tensor:
    n = way.A_log.shape[1]
    low, b, c = torch.split(way.x_proj.weight.detach(), [way.dt_proj.in_features, n, n])
    rest = [i for i in range(n) if i not in set(keep.tolist())]
    return torch.cat([low, b[keep], c[keep] + refit.to(c.dtype) @ c[rest]])


def _pruned_s4d(mixer: S4DMixer, keep: Tensor) -> dict[str, Tensor]:
    """The kept poles of every channel, and the C whose impulse response is nearest to the old one over all time."""
    kernel = mixer.kernel
    with torch.no_grad():
        a, factor = (x.to(torch.complex128) for x in kernel.discretize())
        c = kernel.complex_c().to(torch.complex128)
        kept = [x.gather(1, keep) for x in (a, factor)]
        # A response 2 Re(sum r a^t) is that of the poles and their conjugates; Gram matrices 1 / (1 - conj(a) a').
        full, part = (torch.cat([x, x.conj()], dim=1) for x in (a, kept[0]))
        residues = torch.cat([c * factor, (c * factor).conj()], dim=1)
        gram, cross = (1 / (1 - part.conj().unsqueeze(2) * x.unsqueeze(1)) for x in (part, full))
        solved = torch.linalg.solve(gram, (cross @ residues.unsqueeze(2))).squeeze(2)[:, : keep.shape[1]]
        # Poles that nearly coincide have no stable solution; such channels keep their own C.
        stable = torch.isfinite(solved.abs()).all(1, keepdim=True) & (solved.abs().amax(1, keepdim=True) < 1e4)
        refitted = torch.where(stable, solved / kept[1], c.gather(1, keep))
        found = {"kernel.C": torch.view_as_real(refitted).to(kernel.C.dtype)}
        return found | {f"kernel.{x}": getattr(kernel, x).detach().gather(1, keep) for x in ("log_A_real", "A_imag")}


def _pruned_mamba2(mixer: Mamba2Mixer, keep: Tensor) -> dict[str, Tensor]:
    """Rows of B and C, per group; C passes a convolution and SiLU, so there is no linear refit of it."""
    inner, n, groups = mixer.d_inner, mixer.d_state, mixer.ngroups
    kept = (torch.arange(groups, device=keep.device).unsqueeze(1) * n + keep).flatten()
    conv = torch.cat([torch.arange(inner, device=keep.device), inner + kept, inner + groups * n + kept])
    head = torch.arange(inner, device=keep.device)
    total = len(mixer.in_proj.weight)
    rows = torch.cat([head, inner + conv, torch.arange(total - mixer.nheads, total, device=keep.device)])
    found = {"in_proj.weight": mixer.in_proj.weight.detach()[rows], "conv1d.weight": mixer.conv1d.weight.detach()[conv]}
    if mixer.conv1d.bias is not None:
        found["conv1d.bias"] = mixer.conv1d.bias.detach()[conv]
    return found


def _approach(model: Backbone, small: Backbone, batches: list[Any], steps: int, rate: float) -> None:
    """Train all parameters of the small model towards the outputs and the states of the model."""
    mode: Literal["zoh", "euler"] = "zoh" if any(isinstance(x, S4DMixer) for x in small.modules()) else "euler"
    old, new = Recorder(model, b_mode=mode), Recorder(small, b_mode=mode)
    optimizer = torch.optim.Adam(small.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    small.train()
    with torch.enable_grad():
        for step in range(steps):
            batch = batches[step % len(batches)]
            with torch.no_grad(), old.recording():
                wanted = logits_of(_call(model, batch))
                past = [space.detach() for space in old.flat()]
            with new.recording():
                logits = logits_of(_call(small, batch))
                loss = F.kl_div(logits.log_softmax(-1).flatten(0, -2), wanted.log_softmax(-1).flatten(0, -2),
                                log_target=True, reduction="batchmean")  # fmt: skip
                drifts = [_relative(was, now) for was, now in zip(past, new.flat(), strict=True)]
            optimizer.zero_grad()
            (loss + torch.stack(drifts).mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    old.clear()
    new.clear()
    small.zero_grad()
    small.eval()


def _relative(old: StateSpace, new: StateSpace) -> Tensor:
    """Mean output distance as a share of the old systems' own energy."""
    if old.a.is_complex():  # S4D keeps one half of conjugate pairs
        old, new = old.with_conjugates(), new.with_conjugates()
    silent = StateSpace(old.a, torch.zeros_like(old.c), old.b, old.mask)
    old, new, silent = (space.without_padding() for space in (old, new, silent))
    own = distance(silent, old, kind="output", validate=False).mean()
    return distance(old, new, kind="output", validate=False).mean() / own.clamp_min(torch.finfo(own.dtype).tiny)
