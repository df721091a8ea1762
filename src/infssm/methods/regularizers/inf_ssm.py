"""Inf-SSM and Inf-SSM+ as published, and Inf-SSM-exact: distances of infinite-horizon observability.

`inf-ssm` is for reproduction: its simplified distance is not 0 between equal systems and its gradient there is not 0
either, so a strong weight or a large learning rate pulls the new model away from the old one. `inf-ssm-exact` is the
recommended form: a distance with its minimum at the old model, and a weight that is measured by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import (
    ALL_DATA,
    ComponentConfig,
    Context,
    ModelPair,
    PairConfig,
    Regularizer,
    Terms,
)
from infssm.methods.core.losses import b_difference, mean_over_states, squared_difference
from infssm.methods.regularizers.auto_weight import AutoWeighted
from infssm.ssm import StateSpace, distance, list_distances

DESTRUCTIVE_WEIGHT = 3e4
SMALL_MODEL = 5_000_000
"""Parameters. The published weights are for Vim-tiny (7 million) and Vim-small (26 million). With a Vim of 270,000
parameters on CIFAR-100, AA fell from 10.5 (plain training) to 7.1 with weight 1e5 and to 3.3 with 1e6."""


class InfSSMConfig(PairConfig):
    """Options of :class:`InfSSM`."""

    weight: float = Field(1e6, ge=0, description="λ of the paper, Tables 12-19")
    equality: Literal["token", "tensor", "off"] = Field(
        "token",
        description="when equal systems count as distance 0: per token (paper), per layer (released code), never",
    )


@register_method
class InfSSM(Regularizer):
    """The paper's method: holds what each state space layer can output, by a simplified distance. To reproduce.

    ``λ · mean(1 - cos²θ)``: the simplified distance between the observability subspaces of old and new.

    Paper: Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning for State Space Models, 2025
    """

    name = "inf-ssm"
    supported_data = ALL_DATA
    Config: ClassVar[type[ComponentConfig]] = InfSSMConfig
    config: InfSSMConfig
    needs_states = True
    family = "inf-ssm"

    def warnings(self) -> list[str]:
        """The distance has its minimum away from the old model; a large weight destroys a small model."""
        texts = [
            f"{self.name} is the paper's method, kept for reproduction: its distance is smallest away from the old "
            "model, so training on it moves the model away from what it knew; use 'inf-ssm-exact' otherwise"
        ]
        size = sum(p.numel() for p in self.context.module.parameters())
        if self.config.weight >= DESTRUCTIVE_WEIGHT and size < SMALL_MODEL:
            texts.append(
                f"{self.name} with weight {self.config.weight:g} will destroy what this model has learned: 1e6 is the "
                f"paper's weight for models of 7 million parameters and more, this one has {size:,}, and on a small "
                "model 3e4 is too much already; set a lower weight (method.weight=1e3), or use 'inf-ssm-exact', which "
                "sets its own"
            )
        return texts

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``distance``."""
        equality = self.config.equality

        def simplified(old: StateSpace, new: StateSpace) -> Tensor:
            return distance(old, new, kind="simplified", soft_normalize=True, validate=False, equality=equality)

        # With "tensor" the values of a layer's tokens depend on each other.
        mean = mean_over_states(pair, simplified, at_once=equality != "tensor")
        return {"distance": self.config.weight * mean}


class InfSSMPlusConfig(InfSSMConfig):
    """Options of :class:`InfSSMPlus`."""

    gamma: float = Field(1.0, ge=0, description="γ of the paper: weight of the B term, Tables 12-13")
    b_weight: Literal["product", "separate"] = Field(
        "product", description="B term weighted λ·γ (the paper's equation) or γ alone"
    )


@register_method
class InfSSMPlus(InfSSM):
    """Inf-SSM, and the layers' inputs (B) are held too.

    Inf-SSM plus the mean squared difference of B̃.

    Paper: Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning for State Space Models, 2025
    """

    name = "inf-ssm+"
    Config = InfSSMPlusConfig
    config: InfSSMPlusConfig

    def penalty(self, pair: ModelPair) -> Terms:
        """The terms ``distance`` and ``b``."""
        b = b_difference(pair, method=self.name, without=InfSSM.name)
        weight = self.config.gamma * (self.config.weight if self.config.b_weight == "product" else 1.0)
        return super().penalty(pair) | {"b": weight * b}


class InfSSMExactConfig(PairConfig):
    """Options of :class:`InfSSMExact`."""

    distance: Mapping[str, float] = Field(
        {"output": 1.0},
        validate_default=True,
        description="a kind, or a weighted sum such as 'martin+0.1*c'; a, b, c are squared differences of states",
    )
    weight: float | Literal["auto"] = Field(
        "auto", description="a number, or 'auto': the penalty's gradient has a fifth of the norm of the loss's"
    )
    measure_at: int = Field(
        16, gt=0, description="step of a task at which 'auto' measures first; then at twice, four times, ... that"
    )

    @field_validator("distance", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        terms = [term.strip().rpartition("*") for term in value.split("+")]
        return {kind.strip(): float(factor or 1.0) for factor, _, kind in terms}

    @field_validator("distance")
    @classmethod
    def _known(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if not value:
            raise ValueError("name one distance or more")
        if unknown := set(value) - {"a", "b", "c", *list_distances()}:
            raise ValueError(f"unknown distance {sorted(unknown)}; known: a, b, c, {', '.join(list_distances())}")
        return value


@register_method
class InfSSMExact(AutoWeighted):
    """Holds what each state space layer can output, by an exact distance; sets its weight automatically. Recommended.

    ``weight · mean(distance)`` with any distance of ``infssm list distances`` or a weighted sum of them.

    Paper: after Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning for State Space Models, 2025; with the
    distances of docs/guide/distances.md
    """

    name = "inf-ssm-exact"
    supported_data = ALL_DATA
    Config = InfSSMExactConfig
    config: InfSSMExactConfig
    needs_states = True
    family = "inf-ssm"

    def __init__(self, config: InfSSMExactConfig, context: Context) -> None:
        super().__init__(config, context)
        self._differences = [(factor, _difference(kind)) for kind, factor in config.distance.items()]

    def drift(self, pair: ModelPair) -> Tensor:
        """The unweighted penalty."""
        terms = [factor * mean_over_states(pair, difference) for factor, difference in self._differences]
        return torch.stack(terms).sum()

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``distance``."""
        return {"distance": self.weigh(self.drift(pair))}


def _difference(kind: str) -> Callable[[StateSpace, StateSpace], Tensor]:
    if kind in ("a", "b", "c"):
        return squared_difference(kind)
    return lambda old, new: distance(old, new, kind=kind, soft_normalize=True, validate=False)
