"""Which settings of a run decide its results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from typing import Any

from infssm.learner.config.fields import free_settings

FREE = free_settings()
"""Settings that results do not depend on; they are marked where they are defined."""


def counting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that decide results, the seed among them, by their dotted names."""
    return dict(flatten(config, without=FREE))


def settings_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 over the settings that decide results."""
    text = json.dumps(sorted(counting(config).items()), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def is_one_of(name: str, settings: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the settings or lies in a section of theirs."""
    return f"{name}.".startswith(tuple(f"{setting}." for setting in settings))


def flatten(values: Mapping[str, Any], prefix: str = "", *, without: Container[str] = ()) -> list[tuple[str, Any]]:
    """Nested mappings as (dotted name, value) pairs; ``without`` names settings and whole sections to leave out."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in without:
            continue
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{name}.", without=without)
        else:
            pairs.append((name, value))
    return pairs
