"""Models of other libraries as ONNX files: onnxruntime alone gives their logits."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError, NoSSMLayersError
from infssm.integrations.onnx import export_onnx
from infssm.integrations.transformers import accelerate, restore
from infssm.ssm import record_states
from tests.compare import assert_rounding
from tests.ssm import hf, vision


class Vision(nn.Module):
    """Patches, one of MambaVision's mixers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 12, 4, stride=4)
        self.mixers = nn.ModuleList([vision.mixer()])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            tokens = tokens + mixer(tokens)
        return self.head(tokens.mean(1))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {"num_hidden_layers": 1}),
        ("mamba2", {"num_hidden_layers": 1}),
        ("bamba", {"time_step_limit": (0.02, 0.06)}),
    ],
    ids=["mamba", "mamba2", "bamba"],
)
def test_transformers_models_run_in_onnxruntime(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = hf.make(family, **options).eval()
    assert export_onnx(model, hf.tokens(), tmp_path / "model.onnx") < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    longer = torch.randint(1, hf.VOCAB, (3, 2 * hf.TOKENS + 1))
    (found,) = session.run(None, {"tokens": longer.numpy()})
    with torch.no_grad():
        expected = model(longer, use_cache=False).logits
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-4 * expected.abs().max().clamp_min(1)


def test_mambavision_on_our_scan_and_in_onnxruntime(tmp_path: Path) -> None:
    model, x = Vision().eval(), torch.randn(2, 3, 16, 16)
    expected = model(x)
    with record_states(model) as probed:
        model(x)
    accelerate(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with record_states(model) as states:
        model(x)
    for ours, theirs in zip(states.flat(), probed.flat(), strict=True):
        for name in "abc":
            assert_rounding(getattr(ours, name), getattr(theirs, name))
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    restore(model)
    assert type(model.mixers[0]).__name__ == "MambaVisionMixer"
    assert export_onnx(Vision().eval(), x, tmp_path / "model.onnx") < 1e-4


class Windows(Vision):
    """With the number of images as a constant, as in MambaVision's windows, and kernels that are not there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(int(len(x) / 1.0), *x.shape[1:]))


def test_a_model_that_takes_one_number_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Windows().eval(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ConfigError, match="fixed=True"):
        export_onnx(model, x, tmp_path / "model.onnx")
    with torch.no_grad():
        expected = model(x[:1])

    def kernel(*_: Any) -> Tensor:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(vision.MambaVisionMixer, "forward", kernel)
    assert export_onnx(model, x[:1], tmp_path / "model.onnx", fixed=True) < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": x[:1].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two samples or more"):
        export_onnx(hf.make("mamba"), hf.tokens()[:1], tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match=r"expected \[n, time\]"):
        export_onnx(hf.make("mamba"), hf.tokens()[..., None], tmp_path / "model.onnx")
    with pytest.raises(NoSSMLayersError, match="MambaVisionMixer"):
        export_onnx(nn.Linear(3, 3), torch.randn(2, 3), tmp_path / "model.onnx")
