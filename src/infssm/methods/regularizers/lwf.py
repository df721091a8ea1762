"""LwF-AC and LwF-ABC: keep each layer's states where the old model has them, in mean squared error.

The paper's state variants (its Tables 2, 6, 12 and 13) of LwF; the logit distillation itself is ``lwf``.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, ComponentConfig, ModelPair, PairConfig, Regularizer, Terms
from infssm.methods.core.losses import b_difference, mean_over_states, squared_difference


class LwFACConfig(PairConfig):
    """Options of :class:`LwFAC`."""

    weight: float = Field(
        1e4, ge=0, description="on MSE(A) + MSE(C); the paper uses 50 to 500 (MSE-lambda, Tables 12-13)"
    )


class LwFABCConfig(LwFACConfig):
    """Options of :class:`LwFABC`."""

    b_weight: float = Field(1e3, ge=0, description="on MSE(B); the paper uses 10 to 500 (MSE-gamma, Tables 12-13)")


@register_method
class LwFAC(Regularizer):
    """Keeps the numbers A and C of every state space layer near those of the old model. The simplest state penalty.

    ``weight · mean(MSE(Ã) + MSE(C̃))`` over tokens, layers and directions.

    Paper: Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning for State Space Models, 2025; after Li and
    Hoiem, Learning without Forgetting, ECCV 2016, arXiv:1606.09282
    """

    name = "lwf-ac"
    supported_data: ClassVar[frozenset[str]] = ALL_DATA
    Config: ClassVar[type[ComponentConfig]] = LwFACConfig
    config: LwFACConfig
    needs_states: ClassVar[bool] = True
    family: ClassVar[str | None] = "lwf-ac"

    def penalty(self, pair: ModelPair) -> Terms:
        """The terms ``a`` and ``c``."""
        return {k: self.config.weight * mean_over_states(pair, squared_difference(k)) for k in ("a", "c")}


@register_method
class LwFABC(LwFAC):
    """LwF-AC, and B is kept near the old model's, too.

    LwF-AC plus ``b_weight · MSE(B̃)``.

    Paper: Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning for State Space Models, 2025
    """

    name = "lwf-abc"
    Config = LwFABCConfig
    config: LwFABCConfig

    def penalty(self, pair: ModelPair) -> Terms:
        """The terms ``a``, ``c`` and ``b``."""
        b = b_difference(pair, method=self.name, without=LwFAC.name)
        return super().penalty(pair) | {"b": self.config.b_weight * b}
