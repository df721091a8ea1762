"""`export`: a model as a file that runs without infssm, checked against the model it came from."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from infssm._files import atomic_file
from infssm.errors import ConfigError, InfssmError
from infssm.learner.convolutions import with_fixed_convolutions
from infssm.learner.predict import TrainedClassifier

Form = Literal["onnx", "torch"]
TOLERANCE = 1e-4
"""Largest difference between logits of the file and of the model, relative to the largest logit (at least 1)."""


def export_classifier(classifier: TrainedClassifier, path: str | os.PathLike[str], to: Form = "onnx") -> float:
    """Write the model of a run to ``path``; returns the largest difference of its logits from the model's own.

    The file takes model input ``image: [b, channels, size, size]`` (what ``classifier.transform`` gives), any number of
    them, and gives ``logits: [b, K]``; an ONNX file names the classes in its metadata (``classes``, JSON).
    """
    if classifier.recipe is None:
        raise ConfigError("models of sounds and series are not exported yet as files: use the run by infssm.load")
    size = classifier.recipe.size
    example = torch.randn(2, classifier.recipe.channels, size, size, generator=torch.Generator().manual_seed(0))
    return export_model(classifier.model, example, path, to, {"classes": json.dumps(classifier.classes)})


def export_model(
    model: nn.Module,
    example: Tensor,
    path: str | os.PathLike[str],
    to: Form = "onnx",
    metadata: Mapping[str, str] | None = None,
) -> float:
    """Write any model to ``path``; ``example: [b, ...]``, b > 1, is an input of it. See :func:`export_classifier`."""
    if to not in ("onnx", "torch"):
        raise ConfigError(f"to={to!r}: a model is exported to 'onnx' or to 'torch'")
    target = Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} to write {target.name} to")
    model = model.eval().cpu()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        content = _onnx(model, example, metadata or {}) if to == "onnx" else _torch(model, example)
    with atomic_file(target) as file:
        file.write(content)
    return _difference(model, example, target, to)


def _torch(model: nn.Module, example: Tensor) -> bytes:
    import io

    file = io.BytesIO()
    torch.export.save(_traced(model, example), file)
    return file.getvalue()


def _traced(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _onnx(model: nn.Module, example: Tensor, metadata: Mapping[str, str]) -> bytes:
    try:
        import onnxscript as _onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("export to ONNX needs onnx and onnxscript: pip install 'infssm[export]'") from None
    level = logging.getLogger("onnxscript").level
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    try:
        program = torch.onnx.export(
            _traced(with_fixed_convolutions(model, example), example),
            input_names=["image"],
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"the model cannot be written as ONNX ({reason}); --to torch takes every model") from error
    finally:
        logging.getLogger("onnxscript").setLevel(level)
    assert program is not None
    proto = program.model_proto
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()
    return content


@torch.no_grad()
def _difference(model: nn.Module, example: Tensor, path: Path, to: Form) -> float:
    """Run the file on batches of another size than it was made with; raise where it is another model."""
    batches = (example[:1], torch.cat([example, example.flip(0)]) * 0.5)
    largest = 0.0
    for batch in batches:
        expected = model(batch)
        found = _run_onnx(path, batch) if to == "onnx" else torch.export.load(path).module()(batch)
        known = torch.isfinite(expected)  # classes that were not learnt score -inf
        scale = max(1.0, float(expected[known].abs().max()))
        if not torch.equal(known, torch.isfinite(found)):
            raise InfssmError(f"the exported model {path} gives other logits than the model it came from")
        largest = max(largest, float((found - expected)[known].abs().max()) / scale)
    if largest > TOLERANCE:
        raise InfssmError(f"the exported model {path} gives logits that are off by {largest:.1e}")
    return largest


def _run_onnx(path: Path, batch: Tensor) -> Tensor:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError("checking an ONNX file needs onnxruntime: pip install 'infssm[export]'") from None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"image": batch.numpy()})[0])
