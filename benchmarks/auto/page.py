"""The figures of docs/results/auto.md, from what benchmarks.auto and benchmarks.sequences stored."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.auto.language import DOMAINS
from benchmarks.auto.regimes import GROUPS
from benchmarks.pages import RESULTS, markdown_table, standard_error, write_tables
from benchmarks.sequences.page import Point

ANSWER = """With its automatic weight (the default) `inf-ssm-exact` costs little and gains a little: over all {pairs}
pairs of runs with an AA the mean difference to training without a penalty is {gain} points. It is made to
lose at most 1 point of AA, or 3 % of the newest domain's perplexity, in any regime; of {total} regimes
this holds in {holds}, is broken in {broken} and left open by too few seeds in {open}. A weight chosen by
a search holds more and gains more: 10 points of AA on [digits](digits.md) at a learning rate of 1e-3."""
GROUPS_SHOWN = {
    "digits": ("digits", "AA", "task-inc. AA"),
    "digits-replay": ("digits, with replay", "AA", "task-inc. AA"),
    "cifar": ("a part of CIFAR-100", "AA", "task-inc. AA"),
    "heads": ("heads of class statistics", "gda, task prior", "linear"),
    "sequences": ("speech and pixels", "AA", "newest task"),
}
"""What each group of regimes is called, and its two measures."""
BOUND, PERPLEXITY = -1.0, 3.0
"""Points of AA that may be lost, and percent of perplexity that may be added."""


class Row(NamedTuple):
    """A measure of a regime by seed, without a penalty and with auto, and the same of a second measure."""

    label: str
    plain: list[float]
    auto: list[float]
    beside: list[float]
    """Differences of the second measure."""

    @property
    def gains(self) -> list[float]:
        return [b - a for a, b in zip(self.plain, self.auto, strict=True)]


def write(known: Mapping[str, Any]) -> None:
    """Write what is computed into the page."""
    sequences = known["sequences"]
    groups = {group: list(_rows(known.get(group, {}), *GROUPS_SHOWN[group][1:])) for group in GROUPS}
    groups["sequences"] = list(_speech(sequences))
    texts = list(_texts(sequences))
    verdicts = Counter(_verdict(row.gains) for rows in groups.values() for row in rows)
    verdicts.update(_verdict(changes, PERPLEXITY) for _, changes, _ in texts)
    counts = {word: verdicts[word] for word in ("holds", "broken", "open")}
    pairs = [gain for rows in groups.values() for row in rows for gain in row.gains]
    tables = {"answer": [ANSWER.format(total=verdicts.total(), pairs=len(pairs), gain=_mean(pairs, "+"), **counts)]}
    tables["summary"] = _summary(groups, texts)
    for group, (_, first, second) in GROUPS_SHOWN.items():
        tables[group] = _table(groups[group], first, second)
        if missing := [label for label in GROUPS.get(group, ()) if label not in known.get(group, {})]:
            tables[group] += ["", f"Not measured: {'; '.join(missing)}."]
    tables["language through infssm run"] = _text_table(texts)
    tables["language"] = _language(known["language"]["seeds"])
    if orders := known["language"].get("orders"):
        tables["orders"] = _orders(orders)
    write_tables(RESULTS / "auto.md", tables)


def _summary(groups: Mapping[str, Sequence[Row]], texts: Sequence[tuple[str, list[float], Any]]) -> list[str]:
    """One line per group of regimes."""
    rows = []
    for group, (title, *_) in GROUPS_SHOWN.items():
        means = [statistics.mean(row.gains) for row in groups[group]]
        found = Counter(_verdict(row.gains) for row in groups[group])
        cells = [f"{v:+.1f}" for v in (statistics.mean(means), min(means), max(means))]
        cells += [str(found[word]) for word in ("holds", "broken", "open")]
        rows.append([title, str(len(means)), *cells])
    found = Counter(_verdict(changes, PERPLEXITY) for _, changes, _ in texts)
    counts = [str(found[word]) for word in ("holds", "broken", "open")]
    rows.append(["language", str(len(texts)), "-", "-", "-", *counts])
    header = ["regimes", "number", "mean difference", "smallest", "largest", "bound holds", "broken", "open"]
    return markdown_table(header, rows, numbers=7)


def _rows(regimes: Mapping[str, Any], first: str, second: str) -> Iterator[Row]:
    for label, seeds in regimes.items():
        pairs = list(seeds.values())
        plain, auto = ([pair[arm][first] for pair in pairs] for arm in (0, 1))
        yield Row(label, plain, auto, [pair[1][second] - pair[0][second] for pair in pairs])


def pairs_of(sequences: Mapping[str, Any]) -> dict[str, Any]:
    """Streams of the sequences page that have auto: plain training at the same rate, and auto, by seed."""
    found: dict[str, Any] = {}
    for name, stream in sequences.items():
        arms = stream.get("arms", {})
        if "output auto" in arms:
            auto, plain = arms["output auto"]["points"], next(iter(arms.values()))["points"]
            seeds = {seed: [plain[seed], auto[seed]] for seed in auto if seed in plain}
            found[name] = {"bits": stream["bits"], "seeds": seeds}
    return found


def _arms(sequences: Mapping[str, Any], *, bits: bool) -> Iterator[tuple[str, list[tuple[Point, Point]]]]:
    for name, stream in sequences.items():
        if stream["bits"] == bits:
            yield name, [(Point(*plain), Point(*auto)) for plain, auto in stream["seeds"].values()]


def _speech(sequences: Mapping[str, Any]) -> Iterator[Row]:
    for name, pairs in _arms(sequences, bits=False):
        plain, auto = ([100 * pair[arm].mean for pair in pairs] for arm in (0, 1))
        yield Row(name, plain, auto, [100 * (b.newest - a.newest) for a, b in pairs])


def _texts(sequences: Mapping[str, Any]) -> Iterator[tuple[str, list[float], list[tuple[Point, Point]]]]:
    """For each language stream: the percentage by which auto raises the newest domain's perplexity, by seed."""
    for name, pairs in _arms(sequences, bits=True):
        yield name, [100 * (2 ** (b.newest - a.newest) - 1) for a, b in pairs], pairs


def _mean(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard error; of one seed its value."""
    mean = f"{statistics.mean(values):{sign}.1f}"
    return mean if len(values) == 1 else f"{mean} ± {standard_error(values):.1f}"


def _verdict(differences: Sequence[float], bound: float = BOUND) -> str:
    """Whether a mean stays on the better side of a bound, by a standard error; one seed cannot tell."""
    if len(differences) == 1:
        return "open"
    margin = (statistics.mean(differences) - bound) * (1 if bound < 0 else -1)
    error = standard_error(differences)
    return "holds" if margin >= error else "broken" if margin < -error else "open"


def _table(rows: Sequence[Row], first: str, second: str) -> list[str]:
    cells = []
    for row in rows:
        means = [_mean(row.plain), _mean(row.auto), _mean(row.gains, "+"), _verdict(row.gains), _mean(row.beside, "+")]
        cells.append([row.label, str(len(row.plain)), *means])
    header = ["regime", "seeds", f"{first}, no penalty", "auto", "difference", "bound", f"difference in {second}"]
    return markdown_table(header, cells)


def _text_table(texts: Sequence[tuple[str, list[float], list[tuple[Point, Point]]]]) -> list[str]:
    rows = []
    for name, changes, pairs in texts:
        newest, lost = ([[getattr(p[arm], key) for p in pairs] for arm in (0, 1)] for key in ("newest", "forgetting"))
        cells = [*(f"{statistics.mean(v):.3f}" for v in newest), f"{_mean(changes, '+')} %"]
        cells += [_verdict(changes, PERPLEXITY), *(f"{statistics.mean(v):.3f}" for v in lost)]
        rows.append([name, str(len(pairs)), *cells])
    header = ["stream", "seeds", "newest, no penalty", "auto", "its perplexity", "bound"]
    return markdown_table([*header, "forgetting, no penalty", "auto"], rows)


def _language(seeds: Mapping[str, list[list[list[float]]]]) -> list[str]:
    rows = []
    for task in range(1, len(DOMAINS)):
        for seen in range(task + 1):
            plain, auto = ([arms[arm][task][seen] for arms in seeds.values()] for arm in (0, 1))
            ratios = [b / a for a, b in zip(plain, auto, strict=True)]
            cells = [f"{statistics.mean(plain):.2f}", f"{statistics.mean(auto):.2f}"]
            cells += [f"{statistics.median(ratios):.3f}", f"{statistics.geometric_mean(ratios):.3f}"]
            domain = f"{DOMAINS[seen]} ({'new' if seen == task else 'old'})"
            rows.append([DOMAINS[task], domain, *cells, f"{min(ratios):.3f} to {max(ratios):.3f}"])
    header = ["after", "domain", "no penalty, mean", "auto, mean", "ratio, median", "geometric mean"]
    return [*markdown_table([*header, "smallest to largest"], rows), "", f"Seeds {', '.join(seeds)}."]


def _orders(orders: Mapping[str, list[list[list[float]]]]) -> list[str]:
    rows = [
        [order, *(f"{a:.2f}, {b:.2f}" for a, b in zip(plain[-1], auto[-1], strict=True))]
        for order, (plain, auto) in orders.items()
    ]
    return markdown_table(["order", *(f"{domain}: no penalty, auto" for domain in DOMAINS)], rows)
