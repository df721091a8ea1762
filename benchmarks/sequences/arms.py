"""The streams and arms of docs/results/sequences.md: what is trained, from which start, with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infssm.learner.config.load import merge

RATE, HIGH, HIGHEST, LOW = 2e-3, 4e-3, 8e-3, 3e-4
SMALL = {"d_model": 64, "n_layer": 2}
LANGUAGE: dict[str, Any] = {
    "data": {"by": "domain", "options": {"length": 128}},
    "model": {"name": "mamba_lm_nano", "options": SMALL},
    "train": {
        "epochs": 1,
        "task0_epochs": 4,
        "batch_size": 8,
        "lr": RATE,
        "min_lr": RATE / 10,
        "warmup_lr": RATE / 10,
        "warmup_epochs": 0.1,
        "weight_decay": 0.01,
        "threads": 1,
        "accelerator": "cpu",
    },
}
STDLIB = {
    "data": {
        "name": "stdlib-text",
        "num_tasks": 2,
        "tasks": [["topics"], ["source"]],
        "options": {"limit": 150_000},
    }
}
MANUALS = {"data": {"num_tasks": 3, "tasks": [["en"], ["de"], ["fr"]]}, "train": {"epochs": 2, "task0_epochs": 6}}
SIX = {"data": {"num_tasks": 6, "tasks": [["en"], ["de"], ["fr"], ["es"], ["it"], ["pl"]]}, "train": MANUALS["train"]}
LARGER = {  # 5.4 million parameters, BPE tokens
    "data": {"num_tasks": 3, "tasks": [["en"], ["de"], ["fr"]]},
    "model": {"options": {"d_model": 320, "n_layer": 6}},
    "train": {"epochs": 1, "task0_epochs": 3},
}
PRESET_RATE = 3e-3
PRESET = {  # stdlib-text/domains
    "data": {"name": "stdlib-text", "num_tasks": 4, "options": {"limit": 60_000}},
    "train": {"epochs": 3, "task0_epochs": 6, "batch_size": 16, "warmup_epochs": 0.2, "warmup_lr": 1e-5},
}
SPEECH: dict[str, Any] = {
    "data": {"name": "speech-digits", "bands": 40},
    "model": {"options": {"d_model": 48, "n_layer": 2}},
    "train": {
        "epochs": 4,
        "task0_epochs": 30,
        "batch_size": 16,
        "eval_batch_size": 64,
        "lr": RATE,
        "min_lr": RATE / 10,
        "threads": 1,
        "accelerator": "cpu",
    },
}
SPEECH_STREAMS: dict[str, dict[str, Any]] = {
    "speakers": {"data": {"by": "speaker", "num_tasks": 6, "train_per_class": 20}},
    "digits": {"data": {"by": "class", "num_tasks": 5, "train_per_class": 12}, "train": {"epochs": 6}},
}
SPEECH_MODELS = ("mamba_nano", "s4d_nano")
PIXELS: dict[str, Any] = {
    "benchmark": "cifar100-pixels",
    "data": {"num_tasks": 5, "by": "class"},
    "model": {"name": "s4d_base"},
    "train": {
        "epochs": 2,
        "task0_epochs": 2,
        "batch_size": 20,
        "eval_batch_size": 50,
        "warmup_epochs": 0.2,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "threads": 1,
        "accelerator": "cpu",
    },
}
PIXEL_CLASSES, PIXEL_TRAIN, PIXEL_TEST = 20, 25, 10
"""Of CIFAR-100: the first classes by number, and images of each; a tenth of the training images validates."""
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""What the public S4D weights were trained with."""


class Arm(NamedTuple):
    """One setting: what it is called, the family it is a setting of, what it changes, its learning rate."""

    label: str
    family: str
    method: dict[str, Any]
    lr: float = RATE
    start: str | None = None
    """``train.task0`` where the arm does not start from the task-0 model of plain training."""


class Stream(NamedTuple):
    """A stream under a model: its name on the page, the settings of its runs, its arms, its measure."""

    name: str
    base: dict[str, Any]
    arms: list[Arm]
    bits: bool = False
    weights: tuple[Path, ...] = ()
    """Pre-trained weights, one file per seed in turn; none: from scratch."""


def plain(*rates: float) -> list[Arm]:
    """Plain training at learning rates; the first one's task 0 is where all arms start."""
    return [Arm(f"plain, lr {lr:g}", "plain", {"name": "seq"}, lr) for lr in rates]


def _lwf(weight: float, **others: float) -> dict[str, Any]:
    """Language: logits at temperature 1, as a model's next token is predicted; with the weights of other penalties."""
    options = {name.replace("_", "-"): {"weight": value} for name, value in others.items()}
    return {"name": "+".join(["lwf", *options]), "lwf": {"weight": weight, "temperature": 1.0}, **options}


def _text_arms(rate: float) -> list[Arm]:
    """What holds the old domains, two or three weights each, at a rate."""
    end = "" if rate == RATE else f", lr {rate:g}"
    found = [
        *((f"lwf {w:g}", "lwf", _lwf(w)) for w in (0.3, 0.5, 1.0)),
        *((f"lwf {w:g} + output 10", "lwf + inf-ssm-exact", _lwf(w, inf_ssm_exact=10.0)) for w in (0.3, 0.5)),
        *((f"lwf {w:g} + lwf-ac 100", "lwf + lwf-ac", _lwf(w, lwf_ac=100.0)) for w in (0.3, 0.5)),
        *((f"output {w:g}", "inf-ssm-exact", {"name": "inf-ssm-exact", "weight": float(w)}) for w in (10, 100)),
        *((f"lwf-ac {w:g}", "lwf-ac", {"name": "lwf-ac", "weight": float(w)}) for w in (100, 300)),
        ("er, 100 samples", "er", {"name": "er", "buffer_size": 100}),
    ]
    return [Arm(label + end, family, method, rate) for label, family, method in found]


def _self_replay(rates: Sequence[float], weights: Sequence[float], replay_batch: int = 16, **more: Any) -> list[Arm]:
    """What the old model generates; ``replay_batch`` sequences in every step."""
    of = ("" if replay_batch == 16 else f" of {replay_batch}") + (" growing" if more.get("growing") else "")
    options = {"name": "self-replay", "replay_batch": replay_batch, **more}
    return [
        Arm(f"self-replay {w:g}{of}, lr {lr:g}", "self-replay", {**options, "weight": w}, lr)
        for lr in rates
        for w in weights
    ]


def _stored(rates: Sequence[float], samples: int) -> list[Arm]:
    """Replay of stored samples of all domains together."""
    return [Arm(f"er, {samples} samples, lr {lr:g}", "er", {"name": "er", "buffer_size": samples}, lr) for lr in rates]


TEXT_ARMS: list[Arm] = [
    *plain(RATE, HIGH, 1e-3, LOW, 1e-4),
    *_text_arms(RATE),
    *_text_arms(HIGH),
    Arm("output auto", "inf-ssm-exact, auto", {"name": "inf-ssm-exact"}),
    Arm("frozen", "frozen", {"name": "frozen"}),
    *_self_replay((HIGH, HIGHEST), (1.0, 2.0, 3.0)),
    *_self_replay((HIGHEST * 2,), (3.0,)),
    *_self_replay((HIGH, HIGHEST), (2.0, 3.0), replay_batch=8),
    *_self_replay((HIGH, HIGHEST), (2.0, 3.0), replay_batch=4),
    *plain(HIGHEST),
    Arm(f"lwf 1, lr {HIGHEST:g}", "lwf", _lwf(1.0), HIGHEST),
    *_stored((HIGHEST,), 100),
    *_stored((RATE, HIGH, HIGHEST), 300),
    *_stored((RATE, HIGH, HIGHEST), 3000),
]


def several_arms(rate: float, domains: int) -> list[Arm]:
    """Arms of a stream of many domains: the families that were best on the shorter ones, beside plain training."""
    return [
        *plain(rate, HIGHEST),
        Arm(f"lwf 0.5 + lwf-ac 100, lr {HIGH:g}", "lwf + lwf-ac", _lwf(0.5, lwf_ac=100.0), HIGH),
        *_self_replay((HIGHEST, 2 * HIGHEST), (1.0, 2.0, 3.0)),
        *_self_replay((rate,), (1.0,)),
        *_self_replay((HIGHEST, 2 * HIGHEST), (2.0,), growing=True),
        *_stored((rate, HIGHEST), 100 * domains),
        *_stored((rate, HIGHEST), 1000 * domains),
    ]


def larger_arms() -> list[Arm]:
    """Arms of the larger model, where a run takes minutes; the settings that the small one decides by come first."""
    few = {"sequences": 256, "replay_batch": 8}
    return [
        *plain(RATE),
        *_self_replay((HIGH,), (2.0,), **few),
        Arm("lwf 0.5", "lwf", _lwf(0.5)),
        *_self_replay((RATE,), (2.0,), **few),
        *plain(1e-3, HIGH),
        Arm("lwf 1", "lwf", _lwf(1.0)),
        *_self_replay((HIGHEST,), (2.0,), **few),
    ]


def class_arms(rate: float, low: float, probe: float, *, buffer: int, heads: bool) -> list[Arm]:
    """Arms of a stream of classes or speakers: two settings for each family, and the automatic weight."""
    both = {"name": "lwf+inf-ssm-exact", "lwf": {"weight": 1.0}}
    found = [
        *plain(rate, low),
        *(Arm(f"frozen, lr {lr:g}", "frozen", {"name": "frozen"}, lr) for lr in (rate, probe)),
        *(Arm(f"lwf {w:g}", "lwf", {"name": "lwf", "weight": w}, rate) for w in (1.0, 5.0)),
        *(Arm(f"lwf-ac {w:g}", "lwf-ac", {"name": "lwf-ac", "weight": w}, rate) for w in (1e2, 1e4)),
        *(Arm(f"output {w:g}", "inf-ssm-exact", {"name": "inf-ssm-exact", "weight": w}, rate) for w in (10.0, 100.0)),
        Arm("output auto", "inf-ssm-exact, auto", {"name": "inf-ssm-exact"}, rate),
        *(
            Arm(f"lwf 1 + output {w}", "lwf + inf-ssm-exact", {**both, "inf-ssm-exact": {"weight": w}}, rate)
            for w in (10, "auto")
        ),
        *(
            Arm(f"er, {buffer} samples, lr {lr:g}", "er", {"name": "er", "buffer_size": buffer}, lr)
            for lr in (rate, low)
        ),
    ]
    if heads:
        found += [
            *(
                Arm(f"frozen+{head}", "frozen + statistics", {"name": f"frozen+{head}"}, rate)
                for head in ("lda", "gda")
            ),
            *(Arm(f"seq+lda, lr {lr:g}", "plain + statistics", {"name": "seq+lda"}, lr) for lr in (rate, low)),
            *(
                Arm(f"{name}+lda, lr {low:g}", "held + statistics", {"name": f"{name}+lda", "weight": w}, low)
                for name, w in (("lwf", 1.0), ("inf-ssm-exact", 10.0))
            ),
        ]
    return found


def speaker_arms() -> list[Arm]:
    """Class statistics where every task has all classes: also on moving, replayed and untrained features."""
    held = {"name": "lwf+gda", "lwf": {"weight": 1.0}}
    return [
        *(Arm(f"frozen+{head}", "frozen + statistics", {"name": f"frozen+{head}"}) for head in ("ranpac", "mda")),
        Arm(f"seq+gda, lr {LOW:g}", "plain + statistics", {"name": "seq+gda"}, LOW),
        Arm(f"lwf+gda, lr {LOW:g}", "held + statistics", held, LOW),
        *(
            Arm(f"er+gda, 60 samples, lr {lr:g}", "er", {"name": "er+gda", "er": {"buffer_size": 60}}, lr)
            for lr in (RATE, LOW)
        ),
        *(
            Arm(f"untrained+{head}", "untrained + statistics", {"name": f"frozen+{head}"}, start="skip")
            for head in ("gda", "mda")
        ),
    ]


def text_stream(name: str, changes: Mapping[str, Any], arms: list[Arm] = TEXT_ARMS) -> Stream:
    """Language under a small Mamba of bytes."""
    return Stream(name, merge(LANGUAGE, changes), arms, bits=True)


def speech_stream(kind: str, model: str, root: str) -> Stream:
    """Spoken digits by speaker or by class."""
    changes = {"data": {"root": root}, "model": {"name": model}, "benchmark": f"speech-{kind}"}
    arms = class_arms(RATE, LOW, 1e-2, buffer=60, heads=True)
    if kind == "speakers":
        arms += speaker_arms()
    arms.append(Arm("joint, all seen samples", "joint", {"name": "joint"}))
    return Stream(f"{kind}, {model}", merge(merge(SPEECH, SPEECH_STREAMS[kind]), changes), arms)


def pixel_stream(root: str, pretrained: str, out: Path) -> Stream:
    """CIFAR-100 pixel after pixel, under the public S4D weights of a folder."""
    weights = tuple(sorted(Path(pretrained).glob("*.pth")))
    data = {"data": {"name": str(pixel_file(Path(root), out))}}
    return Stream("pixels, s4d_base", merge(PIXELS, data), _pixel_arms(), weights=weights)


def _pixel_arms() -> list[Arm]:
    """A run costs minutes: one setting for a family that holds the whole model, fixed beforehand."""
    arms = class_arms(1e-3, 1e-4, 1e-2, buffer=40, heads=True)
    left_out = {"frozen, lr 0.001", "lwf 5", "lwf-ac 100", "output 10", "lwf 1 + output 10"}
    left_out |= {"er, 40 samples, lr 0.0001", "lwf+lda, lr 0.0001"}
    kept = [arm for arm in arms if arm.label not in left_out]
    return [kept[0], *sorted(kept[1:], key=lambda arm: "frozen" not in arm.family)]  # the cheap ones first


def pixel_file(root: Path, out: Path) -> Path:
    """``cifar100.npz`` of ``root`` as sequences of 1,024 pixels in the order and scale of the public weights."""
    path = out / f"cifar100-pixels-{PIXEL_CLASSES}x{PIXEL_TRAIN}.npz"
    if path.exists():
        return path
    with np.load(root / "cifar100.npz") as stored:
        parts = [(stored[f"x_{part}"], stored[f"y_{part}"]) for part in ("train", "test")]
        names = stored["classes"][:PIXEL_CLASSES]
    counts = (PIXEL_TRAIN, PIXEL_TEST)
    kept = [
        np.concatenate([np.flatnonzero(y == label)[:count] for label in range(PIXEL_CLASSES)])
        for (_, y), count in zip(parts, counts, strict=True)
    ]
    x = np.concatenate([images[index] for (images, _), index in zip(parts, kept, strict=True)])
    pixels = (x.reshape(len(x), -1, 3) / 255 - np.array(CIFAR10_MEAN)) / np.array(CIFAR10_STD)
    y = np.concatenate([labels[index] for (_, labels), index in zip(parts, kept, strict=True)])
    test = np.repeat([False, True], [len(index) for index in kept])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=pixels.astype(np.float32), y=y.astype(np.int64), classes=names, test=test)
    return path
