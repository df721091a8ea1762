"""The regimes of docs/results/auto.md: settings of the other results pages, without a penalty and with auto."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.heads.fit import Gaussian, gda, linear, load, score, statistics
from benchmarks.heads.runs import SEARCHED, Place, Spec, train
from benchmarks.heads.search import PROTOCOLS
from benchmarks.pages import RESULTS, read_json, remembered
from benchmarks.results.common import SEEDS, Bench
from benchmarks.results.digits import BASE, REGIMES
from benchmarks.results.replay import ALONE, BUFFER, REPLAY, UNMASKED, cifar_base
from infssm.learner.config.load import merge

NAME = "inf-ssm-exact"
Values = dict[str, float]
"""The measure of a run and its value, in percent."""
Pair = tuple[Values, Values]
"""A seed of a regime: without a penalty, and with one that sets its own weight."""


class Places(NamedTuple):
    """Where data and results are."""

    out: Path
    data_root: Path | None = None
    bases: Path | None = None
    """The folder in which ``benchmarks.heads`` made the bases of b50-5."""


class Regime(NamedTuple):
    """How it is measured for a seed, and which seeds it has."""

    measure: Callable[[Places, int], Pair]
    seeds: tuple[int, ...] = SEEDS
    needs: frozenset[str] = frozenset()
    """Places without which it is left out."""


def _trained(stream: str, base: str, options: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Regime:
    """A stream of images, trained as on its page."""

    def measure(places: Places, seed: int) -> Pair:
        start = cifar_base(str(places.data_root)) if stream == "cifar" else BASE
        bench = Bench(stream, merge(start, changes or {}), places.out, 1)
        found = bench.go([(name, dict(options), seed) for name in (base, f"{base}+{NAME}")])
        plain, auto = ({"AA": o.aa, "task-inc. AA": o.ti} for o in found)
        return plain, auto

    return Regime(measure, needs=frozenset({"data_root"} if stream == "cifar" else ()))


def _headed(protocol: str, rate: float) -> Regime:
    """A run of the heads page at a learning rate: its own classifier, and Gaussian classes as plain training chose."""
    known = read_json(RESULTS / "heads.json")[protocol]["arms"]["plain"]
    chosen = [Gaussian(*values) for values in known["settings"]["drift"]["gda"].values()]

    def judged(path: Path) -> Values:
        kept = load(path)
        found = statistics(kept)
        heads = {"linear": linear(kept), "linear, aligned": linear(kept, align=True)}
        heads |= {f"gda, {g.prior} prior": gda(kept, found, g) for g in chosen}
        return {name: score(kept, head, "test").aa for name, head in heads.items()}

    def measure(places: Places, seed: int) -> Pair:
        base = places.bases and str(places.bases / f"base{seed}" / "cifar100-base.safetensors")
        root = None if places.data_root is None else str(places.data_root)
        place = Place(root, places.out / "heads", {SEARCHED: "cifar100-base", seed: base or ""})
        found: list[Values] = []
        for arm, name in (("plain", "seq"), ("auto", NAME)):
            spec = Spec(protocol, seed, arm, {"name": name}, rate)
            train(spec, place)
            path = place.file(spec)
            found.append(remembered(path.with_suffix(".json"), lambda path=path: judged(path), f"{chosen}"))
        return found[0], found[1]

    needs = frozenset({"data_root", "bases"} if protocol == "b50-5" else ())
    return Regime(measure, PROTOCOLS[protocol].seeds, needs)


def _replayed(stream: str) -> dict[str, Regime]:
    """What stands on a replay page, with its buffer."""
    kept = {k: v for k, v in REPLAY.items() if stream != "cifar" or k not in ALONE}
    size = {"buffer_size": BUFFER[stream]}
    found = {label: _trained(stream, base, options | size) for label, (base, options) in kept.items()}
    return {UNMASKED: _trained(stream, "seq", {"mask": "full"})} | found


_OMNIGLOT = {"model": {"weights": "omniglot"}}
GROUPS: dict[str, dict[str, Regime]] = {
    "digits": {
        **{label: _trained("digits", "seq", {}, {"train": train}) for label, train in REGIMES.items()},
        "Omniglot start, lr 1e-3": _trained("digits", "seq", {}, _OMNIGLOT),
        "Omniglot start, lr 1e-4": _trained("digits", "seq", {}, {**_OMNIGLOT, "train": REGIMES["lr 1e-4"]}),
    },
    "digits-replay": _replayed("digits-replay"),
    "cifar": {"seq": _trained("cifar", "seq", {})} | _replayed("cifar"),
    "heads": {
        f"{name}, lr {rate:g}": _headed(name, rate)
        for name, protocol in PROTOCOLS.items()
        for rate in sorted(protocol.low_rates + protocol.rates)
    },
}
"""The compared regimes, by the page they come from."""
