"""Damaged folders of transformers models: loading one gives a model or an error of ours, never a raw exception."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infssm._torchvision import mend
from infssm.models.hub import hub_model
from tests.fuzz import Tally, attempt, conclude

_VALUES: list[Any] = [
    None, True, "", "x", "gelu", -1, 0, 1, 3, 2**31, 10**12, 1e308, float("nan"), [], [1], {}, {"a": 1}, "auto", "../x",
]  # fmt: skip


def make_folder(folder: Path) -> None:
    """A tiny Mamba as ``save_pretrained`` writes it."""
    mend()
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2)).save_pretrained(
        folder
    )


def _change_config(folder: Path, draw: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    key = draw.choice([*config, "quantization_config", "auto_map", "torch_dtype", "dtype", "text_config", "num_labels"])
    if draw.random() < 0.3:
        config.pop(key, None)
    elif key == "auto_map":
        config[key] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (folder / "evil.py").write_text("raise SystemExit('code of the folder was run')\n")
        config["model_type"] = draw.choice(["mamba", "unknown"])
    elif key == "model_type":
        config[key] = draw.choice(["mamba2", "bert", "jamba", "gpt2", "unknown", "t5", "llama", None, 7])
    else:
        config[key] = draw.choice(_VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def _damage_bytes(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = bytearray(file.read_bytes())
    if draw.random() < 0.5:
        del content[draw.randrange(len(content) + 1) :]
    for _ in range(draw.choice([0, 1, 8])):
        if content:
            content[draw.randrange(min(len(content), 2000))] = draw.randrange(256)
    file.write_bytes(content)


def _damage_header(folder: Path, draw: random.Random) -> None:
    file = folder / "model.safetensors"
    if not file.is_file() or file.stat().st_size < 8:
        return
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return
    key = draw.choice(sorted(header))
    action = draw.choice(["drop", "rename", "shape", "dtype", "offsets", "length"])
    if action == "drop":
        del header[key]
    elif action == "rename":
        header[f"x.{key}"] = header.pop(key)
    elif isinstance(header[key], dict):
        header[key][{"offsets": "data_offsets", "length": "shape"}.get(action, action)] = draw.choice(
            [[1, 1], [0], [2**40, 2**40], [-1], "F64", "I8", None, [0, 10**15]]
        )
    text = json.dumps(header).encode()
    size = draw.choice([0, 2**62]) if action == "length" else len(text)
    file.write_bytes(struct.pack("<Q", size) + text + content[8 + length :])


def _damage_files(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(folder.iterdir()))
    action = draw.choice(["remove", "folder", "index", "adapter", "pickle"])
    if action in ("remove", "folder") and file.is_file():
        file.unlink()
        if action == "folder":
            file.mkdir()
    elif action == "index":
        shard = draw.choice(["../../etc/passwd", "model.safetensors", "none.safetensors", 3, None])
        index = draw.choice([{}, [], {"weight_map": {"backbone.norm_f.weight": shard}, "metadata": {}}])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink(missing_ok=True)
    elif action == "adapter":
        (folder / "adapter_config.json").write_text(draw.choice(["{", "{}", json.dumps({"peft_type": "LORA"})]))
    elif (folder / "model.safetensors").is_file():
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


_DAMAGES: list[Callable[[Path, random.Random], None]] = [_change_config, _damage_bytes, _damage_header, _damage_files]


def run(count: int, seed: int) -> None:
    """Load ``count`` damaged folders."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        sound, folder = Path(place, "sound"), Path(place, "damaged")
        make_folder(sound)
        for number in range(count):
            draw = random.Random(f"{seed}-{number}")
            shutil.copytree(sound, folder)
            with contextlib.suppress(ValueError, OSError, IndexError):  # an earlier damage may leave nothing to damage
                for _ in range(draw.choice([1, 1, 2, 3])):
                    draw.choice(_DAMAGES)(folder, draw)
            load = partial(hub_model, f"hf:{folder}", weights=draw.random() < 0.8)
            attempt(tally, f"case {number} of seed {seed}", load)
            shutil.rmtree(folder)
    conclude(tally, "hub_folders")
