"""The figures of docs/results/heads.md and its picture, from the numbers in heads.json; the words are the page's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.heads.search import ARMS, REPLAY
from benchmarks.pages import RESULTS, markdown_table, paired_gain, spread, standard_error, write_tables

PAGE = RESULTS / "heads.md"
SHOWN = ("gda, task prior", "gda", "lda, task prior", "lda", "ranpac", "ncm", "linear, aligned", "linear")
TITLES = {
    "b50-5": "CIFAR-100, 50 classes and then five times 10",
    "digits": "Digits, from scratch",
    "digits-omniglot": "Digits, from the Omniglot start",
}
ANSWER = """Where no image of an old task may be kept, freeze the features after the first task and fit one Gaussian
per class to them: `infssm run method=frozen+gda` reaches {digits} % on digits, where every classifier
trained with the model stays below 40 %. On CIFAR-100 after 50 base classes, with a prior over tasks and
two views of each image (the preset `cifar100/b50-5/frozen+gda`: `method.prior=task
method.mean_token=true method.mirror=true`), it has an AA of {two} %, far above replay with 2,000 images
and its own classifier. Averaging the frozen model with one that keeps learning (`method=lwf-f+gda
method.first_model=true`) raises AA to {both} % and costs {lost} points of accuracy over all classes."""

Arms = Mapping[str, Mapping[str, Any]]


def write(known: Mapping[str, Any]) -> None:
    """Write what is computed into the page, and its picture."""
    tables = dict(_answer(known))
    for name in (name for name in TITLES if name in known):
        arms, unequal = known[name]["arms"], name == "b50-5"
        shown = [h for h in SHOWN if any(h in arm["heads"] for arm in arms.values())]
        if not unequal:  # with tasks of one size both priors are the same
            shown = [h for h in shown if "prior" not in h]
        tables[f"{name}: scores"] = [*_scores(arms, shown, both=unequal), *_left_out(known[name])]
        if "views" in known[name]:
            tables[f"{name}: views"] = _views(known[name]["views"])
    if "costs" in known:
        costs = [[name, f"x{value:.2f}"] for name, value in known["costs"].items()]
        tables["cost"] = markdown_table(["arm", "step"], costs)
    write_tables(PAGE, tables | {"environments": _environments(known)})
    figure(known, PAGE.with_suffix(".svg"))


def _answer(known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The answer and the table that shows it: the best of each kind on b50-5."""
    arms, views = known["b50-5"]["arms"], known["b50-5"]["views"]
    every = views["class token and mean token, mirrored"]
    rows = {
        "`frozen+gda`, task prior, two views (the preset)": every["frozen"]["task"],
        "the same, averaged with a model that keeps learning": every["frozen and lwf-f"]["task"],
        "`frozen+gda`, task prior": arms["frozen"]["heads"]["gda, task prior"],
        "`frozen+lda`": arms["frozen"]["heads"]["lda"],
        "`inf-ssm-exact+gda`, task prior": arms["output"]["heads"]["gda, task prior"],
        "plain training, linear classifier, aligned": arms["plain"]["heads"]["linear, aligned"],
        "`er`, 2,000 images, linear classifier, aligned": arms["er, 2000 images"]["heads"]["linear, aligned"],
        "`x-der`, 2,000 images, `gda`, task prior": arms["x-der, 2000 images"]["heads"]["gda, task prior"],
    }
    two, both = every["frozen"]["task"], every["frozen and lwf-f"]["task"]
    answer = ANSWER.format(
        digits=spread([s["aa"] for s in known["digits"]["arms"]["frozen"]["heads"]["gda"]]),
        two=spread([s["aa"] for s in two]),
        both=spread([s["aa"] for s in both]),
        lost=gain(two, both, "all").removeprefix("+"),
    )
    cells = [[name, *(spread([s[key] for s in scores]) for key in ("aa", "all"))] for name, scores in rows.items()]
    return {"answer": [answer], "best": markdown_table([TITLES["b50-5"], "AA", "all classes"], cells)}


def _left_out(protocol: Mapping[str, Any]) -> list[str]:
    """The arms that the command measures but the JSON file does not have."""
    there = {arm.split(", ")[0] for arm in protocol["arms"]}
    missing = [arm for arm in [*ARMS, *REPLAY] if arm not in there]
    searched = [arm for arm in missing if arm in protocol["search"]]
    others = [arm for arm in missing if arm not in searched]
    lines = ["", f"Searched, but not run on the other bases or seeds: {', '.join(searched)}."] if searched else []
    return [*lines, "", f"Not measured here: {', '.join(others)}."] if others else lines


def _cell(scores: Sequence[Mapping[str, float]] | None, *, both: bool) -> str:
    if not scores:
        return "-"
    aa = spread([s["aa"] for s in scores])
    return f"{aa} / {spread([s['all'] for s in scores])}" if both else aa


def _scores(arms: Arms, shown: Sequence[str], *, both: bool) -> list[str]:
    rows = []
    for name, arm in arms.items():
        setting = "-" if arm["lr"] is None else f"{arm['lr']:g}" + (f", {arm['weight']:g}" if arm["weight"] else "")
        cells = [_cell(arm["heads"].get(head), both=both) for head in shown]
        rows.append([name, setting, f"{statistics.mean(arm['drift']):.2f}", *cells])
    return markdown_table(["arm", "learning rate, weight", "drift", *shown], rows)


def gain(mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], key: str) -> str:
    """Paired difference of a measure, mean ± standard error."""
    return paired_gain([score[key] for score in mine], [score[key] for score in other])


def _views(views: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    rows = []
    for view, models in views.items():
        for name, scores in models.items():
            cells = []
            for prior in ("task", "class"):
                mine, other = scores[prior], models["frozen"][prior]
                gains = " / ".join(gain(mine, other, key) for key in ("aa", "all")) if name != "frozen" else "-"
                cells += [_cell(mine, both=True), gains]
            rows.append([view, name, *cells])
    header = ["features", "model", "gda, task prior: AA / all classes", "gain", "gda: AA / all classes", "gain"]
    return markdown_table(header, rows)


def _environments(known: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in (name for name in TITLES if name in known):
        found = known[name]["environment"]
        versions = f"Python {found['python']}, torch {found['packages']['torch']}"
        lines.append(
            f"- {TITLES[name]}: commit `{found['commit'][:12]}`, {versions}, {found['cpu']}, {found['cores']} cores"
        )
    return lines


def figure(known: Mapping[str, Any], path: Path) -> None:
    """AA against accuracy over all classes on b50-5: one point per arm and head, bars are standard errors."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "infssm"
    import matplotlib.pyplot as plt

    marks = {"gda, task prior": "o", "gda": "s", "lda": "^", "ranpac": "D", "linear, aligned": "v", "linear": "x"}
    canvas, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    for index, (name, arm) in enumerate(known["b50-5"]["arms"].items()):
        for head, mark in marks.items():
            scores = arm["heads"].get(head)
            if scores and (head != "linear" or "images" in name):
                x, y = ([s[key] for s in scores] for key in ("all", "aa"))
                errors = [standard_error(v) for v in (x, y)]
                place = {"x": statistics.mean(x), "y": statistics.mean(y), "xerr": errors[0], "yerr": errors[1]}
                axes.errorbar(**place, fmt=mark, ms=5, color=f"C{index % 10}", mfc=_fill(index))
        axes.plot([], [], "o", color=f"C{index % 10}", mfc=_fill(index), label=name)
    for head, mark in marks.items():
        axes.plot([], [], mark, color="black", mfc="none", label=f"head: {head}")
    axes.set_xlabel("accuracy over all 100 classes, %")
    axes.set_ylabel("AA over 6 tasks, %")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid(alpha=0.3)
    canvas.savefig(path, metadata={"Date": None})
    plt.close(canvas)


def _fill(index: int) -> str:
    """Ten colours, then again with white inside."""
    return f"C{index}" if index < 10 else "white"
