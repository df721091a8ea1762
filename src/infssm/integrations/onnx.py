"""Other people's models as ONNX files: their state space layers are exchanged for ours, which can be exported."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError

from infssm.errors import ConfigError
from infssm.learner.export import export_model
from infssm.ssm import logits_of
from infssm.ssm.accelerate import accelerate


class _Logits(nn.Module):
    """A model of any library as a function of one tensor to logits."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x, **self.options))


def export_onnx(
    model: nn.Module,
    example: Tensor,
    path: str | os.PathLike[str],
    to: Literal["onnx", "torch"] = "onnx",
    *,
    fixed: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> float:
    """Write a model with Mamba, Mamba-2 or MambaVision layers to a file that runs in onnxruntime without infssm.

    transformers loops over the tokens in Python or calls kernels that ONNX does not have; ours become one loop node for
    any number of tokens. The model itself is not changed. Tokens are not padded: give one length per batch.

    Args:
        model: a language model of transformers (Mamba, FalconMamba, Jamba, Mamba-2, Bamba, Zamba2, FalconH1,
            GraniteMoeHybrid) whose layers :func:`infssm.integrations.transformers.accelerate` knows, or a vision model
            with MambaVision mixers.
        example: token numbers ``[n, time]``, int64, or images ``[n, 3, height, width]``; n > 1 unless ``fixed``.
        path: the file to write. Its input is ``tokens`` (any n and time) or ``image`` (any n), its output ``logits``.
        to: ``"onnx"`` or ``"torch"``.
        fixed: let the file take only inputs of the example's shape. MambaVision's own models need it, whose windows
            make the number of images a constant.
        progress: called with a line of text before each stage.

    Returns:
        The largest difference of the file's logits from the model's own, relative to the largest logit. Where the
        model's own layers need a GPU that is not there, from the model with our layers.
    """
    if example.ndim < 2 or (len(example) < 2 and not fixed):
        raise ConfigError(f"example has shape {list(example.shape)}; give a batch of two samples or more")
    tokens = not example.is_floating_point()
    if tokens and example.ndim != 2:
        raise ConfigError(f"token numbers have shape {list(example.shape)}, expected [n, time]")
    portable = accelerate(copy.deepcopy(model).eval().float().cpu())
    config: Any = getattr(portable, "config", None)
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = "eager"  # the others choose by the values of a mask, which a file cannot do
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"  # the default's operator has no ONNX counterpart
    wrapped = _Logits(portable, {"use_cache": False} if tokens else {})
    name = "tokens" if tokens else "image"
    try:
        difference = export_model(
            wrapped, example, path, to, name=name, any_length=tokens, fixed=fixed, progress=progress
        )
    except UserError as error:
        raise ConfigError("the model makes a size of its input a constant; give fixed=True") from error
    with torch.no_grad():  # the file was compared with our layers; compare these with the model's own
        model.eval()
        try:
            own = logits_of(model(example, **wrapped.options)).float()
        except RuntimeError:
            if tokens:
                raise
            return difference  # kernels of MambaVision's mixer, on a CPU
        ours = wrapped(example)
    gap = float((own - ours).abs().max()) / max(1.0, float(own.abs().max()))
    return max(difference, gap)
