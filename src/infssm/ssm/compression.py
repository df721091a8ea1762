"""`compress`: a model with fewer states per layer, pruned by what each state adds to the output, then trained back.

A state is one term of the impulse response, so its share has a closed form: ``|c b|^2 / (1 - |a|^2)``, the energy of
what the output lacks without it. Of selective layers it is averaged over tokens and channels of calibration data,
because all channels share B and C; S4D's channels have systems of their own, and each keeps its own best states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm._batch import run_model
from infssm.errors import ConfigError
from infssm.models import Backbone, Mamba2Mixer, MambaMixer, S4DMixer, VimMixer, create_model
from infssm.models.mamba import Direction
from infssm.ops import ScanInputs
from infssm.ssm.calibration import Refit, Score, Scores, rest_of
from infssm.ssm.distances import distance
from infssm.ssm.mixers import find_mixers, unwrap
from infssm.ssm.probe import as_mask
from infssm.ssm.recorder import Recorder, logits_of
from infssm.ssm.space import StateSpace

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
    """A copy of the model with fewer states per layer, trained for a few steps to match it.

    Each layer keeps the states with the largest score; the remaining C takes over what it can of the rest, by least
    squares (S4D; Mamba and Vim where kept times pruned states are at most 1,024); then all parameters are trained for
    ``steps`` steps towards the model: its output distributions, and its states by the `output` distance, which compares
    systems of different sizes. No labels are needed. The result is a model as `create_model` builds it with
    ``d_state=states``: it saves, loads, trains, exports.

    Args:
        model: a Mamba, Vim, Mamba-2 or S4D model of infssm; it is not changed.
        data: batches of model input (a tensor or a mapping of keyword arguments), or of (input, anything). All are
            used to score states, and in turn for the steps. Tokens that a ``mask`` among them marks as padding are not
            counted.
        states: states per layer to keep.
        share: share of the states to keep, instead of ``states``.
        score: ``output``, the energy above; ``last``, ``|c b|^2 / (1 - |a|)^2`` (LAST, Gwak et al. 2024);
            ``magnitude``, the size of the weights that form B and C.
        steps: training steps; 0 leaves the pruned model unchanged.
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
    """The number of states to keep; raises if the model or the options do not allow it."""
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


def _mask(batch: Any) -> Tensor | None:
    """Padding of a batch, [batch, tokens]; None if every token counts."""
    return as_mask(batch.get("mask")) if isinstance(batch, Mapping) else None


def _logits(model: Backbone, batch: Any) -> Tensor:
    """Logits [rows, classes]; of language models one row per token that is not padding."""
    logits, mask = logits_of(run_model(model, batch)), _mask(batch)
    return logits.flatten(0, -2) if mask is None or logits.ndim == 2 else logits[mask]


def _ways(mixer: Any) -> list[Direction]:
    return mixer.directions() if isinstance(mixer, VimMixer) else [mixer.direction]


Kept = dict[str, list[Tensor]]
"""By mixer: the indices that are kept, one tensor per direction (Mamba-2: [groups, k]; S4D: [channels, k / 2])."""


def _choose(model: Backbone, size: int, batches: list[Any], score: Score) -> tuple[Kept, Kept]:
    """The states each layer keeps, and the map of the rest onto C (selective layers: [k, n - k] per direction)."""
    mixers: dict[str, Any] = find_mixers(model)
    scans = {name: mixer for name, mixer in mixers.items() if not isinstance(mixer, S4DMixer)}
    selective = {name: _ways(mixer) for name, mixer in scans.items() if isinstance(mixer, _SELECTIVE)}
    scores = {name: [_kernel_score(mixer, score)] for name, mixer in mixers.items() if name not in scans}
    if score == "magnitude":
        scores |= {name: _weight_scores(mixer) for name, mixer in scans.items()}
    else:
        sums = {name: [Scores(score) for _ in selective.get(name, [0])] for name in scans}
        _count_scans(model, batches, sums)
        scores |= {name: [found.total for found in directions] for name, directions in sums.items()}
    keep: Kept = {}
    for name, found in scores.items():
        k = size if name in scans else size // 2  # S4D has pairs of states
        best = [each.topk(k, dim=-1).indices.sort(dim=-1).values for each in found]  # in their old order
        keep[name] = [each.squeeze(0) for each in best] if name in selective else best
    # A second pass, because the least squares of all states, before those to keep are known, would be far larger.
    refits = {name: [Refit(kept, mixers[name].d_state) for kept in keep[name]] for name in selective}
    _count_scans(model, batches, refits)
    return keep, {name: [refit.solve() for refit in found] for name, found in refits.items()}


def _count_scans(model: Backbone, batches: list[Any], counters: Mapping[str, Sequence[Any]]) -> None:
    """Run the batches and add every scan, with the padding of its tokens, to `Scores` or `Refit` of its direction."""
    mixers: dict[str, Any] = find_mixers(model)

    def hook(found: Sequence[Any], mask: Tensor | None) -> Callable[[ScanInputs], None]:
        order = iter(found)  # a mixer scans one direction after the other

        def add(x: ScanInputs) -> None:
            next(order).add(x, mask)

        return add

    with torch.no_grad():
        for batch in batches if counters else ():
            try:
                for name, found in counters.items():
                    mixers[name].scan_hook = hook(found, _mask(batch))
                run_model(model, batch)
            finally:
                for name in counters:
                    mixers[name].scan_hook = None


def _kernel_score(mixer: S4DMixer, score: Score) -> Tensor:
    """[channels, n / 2]; the energies do not depend on data."""
    with torch.no_grad():
        a, factor = mixer.kernel.discretize()
        gain = (mixer.kernel.complex_c() * factor).abs().square()
        if score == "magnitude":
            return mixer.kernel.complex_c().abs()
        return gain / (1 - a.abs().square()) if score == "output" else gain / (1 - a.abs()).square()


def _weight_scores(mixer: Any) -> list[Tensor]:
    """Length of B's row times that of C's for every state, ``[groups, n]`` for each direction."""
    if isinstance(mixer, Mamba2Mixer):
        start, groups = 2 * mixer.d_inner, mixer.ngroups
        rows = [mixer.in_proj.weight[start : start + 2 * groups * mixer.d_state].view(2, groups, mixer.d_state, -1)]
    else:
        rows = [way.x_proj.weight[way.dt_proj.in_features :].view(2, 1, mixer.d_state, -1) for way in _ways(mixer)]
    return [found.detach().square().sum(-1).sqrt().prod(0) for found in rows]


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
    return torch.cat([low, b[keep], c[keep] + refit.to(c.dtype) @ c[rest_of(keep, n)]])


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
                wanted = _logits(model, batch)
                past = [space.detach() for space in old.flat()]
            with new.recording():
                logits = _logits(small, batch)
                loss = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
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
