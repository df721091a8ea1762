"""LwF: on the new data, the new model keeps the logits, the features or the states of the old one."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, ComponentConfig, ModelPair, PairConfig, Regularizer, Terms
from infssm.methods.core.losses import b_difference, mean_over_states, squared_difference


class LwFConfig(PairConfig):
    """Options of :class:`LwF`."""

    weight: float = Field(1.0, ge=0, description="on the divergence of the logits (Li and Hoiem: 1, Mammoth: 0.5)")
    temperature: float = Field(
        2.0, gt=0, description="divides both models' logits before the softmax (Li and Hoiem, Mammoth: 2)"
    )


class LwFFConfig(PairConfig):
    """Options of :class:`LwFF`."""

    weight: float = Field(10.0, ge=0, description="on the mean squared difference, or on 1 - cosine")
    distance: Literal["mse", "cosine"] = Field(
        "mse", description="'mse': squared difference, mean over features; 'cosine': 1 - cosine of the vectors"
    )


@register_method
class LwF(Regularizer):
    """Learning without forgetting: on new data, the old classes' probabilities stay those of the old model.

    ``weight · mean KL(softmax(old/T) ‖ softmax(new/T))`` over the classes met before the task. Over all logits where
    tasks name no classes of their own, and per token, padding left out, for language models. Of regression, the mean
    squared difference of the outputs.

    Paper: Li and Hoiem, Learning without Forgetting, ECCV 2016, arXiv:1606.09282
    """

    name = "lwf"
    supported_data = ALL_DATA
    Config = LwFConfig
    config: LwFConfig
    needs_logits = True

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``logits``."""
        assert pair.old.logits is not None
        assert pair.new.logits is not None
        columns = self.context.current.past_classes
        new = pair.new.logits[..., columns]
        old = pair.old.logits[..., columns].to(new.dtype)  # self-replay keeps them in half precision
        if self.context.modality.scoring == "numbers":
            divergence = (new - old).square().sum(dim=-1)
        else:
            divergence = kl_divergence(old, new, self.config.temperature)
        return {"logits": self.config.weight * mean_over_tokens(divergence, pair.mask)}


@register_method
class LwFF(Regularizer):
    """On new data, the features given to the classifier stay near those of the old model.

    ``weight · mean distance`` of the features that old and new model give to their classifier (or output layer).

    Paper: after Li and Hoiem, Learning without Forgetting, ECCV 2016, arXiv:1606.09282, on features
    """

    name = "lwf-f"
    supported_data = ALL_DATA
    Config = LwFFConfig
    config: LwFFConfig
    needs_features = True

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``features``."""
        old, new = pair.old.features, pair.new.features
        assert old is not None
        assert new is not None
        if self.config.distance == "mse":
            distances = (new - old).square().mean(dim=-1)
        else:
            distances = 1 - F.cosine_similarity(new, old, dim=-1)
        return {"features": self.config.weight * mean_over_tokens(distances, pair.mask)}


def kl_divergence(old: Tensor, new: Tensor, temperature: float) -> Tensor:
    """``Σ_c p (log p - log q)`` with p, q the softmax of ``old, new: [..., K]`` over the temperature: ``[...]``."""
    log_p, log_q = (F.log_softmax(logits / temperature, dim=-1) for logits in (old, new))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


def mean_over_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``values: [b]`` or ``[b, tokens]``; where there are tokens, of those that ``mask: [b, tokens]`` keeps."""
    if mask is None or mask.shape != values.shape:
        return values.mean()
    kept = mask.to(values.dtype)
    return (values * kept).sum() / kept.sum().clamp(min=1)  # a batch that is all padding gives 0, not NaN


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
    supported_data = ALL_DATA
    Config: ClassVar[type[ComponentConfig]] = LwFACConfig
    config: LwFACConfig
    needs_states = True
    family = "lwf-ac"

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
