"""`export`: a model as a file that runs without infssm, from raw input, checked against the model it came from."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infssm._files import atomic_file
from infssm._optional import require
from infssm.data.facts import SampleLike
from infssm.errors import ConfigError, InfssmError
from infssm.learner.predict import TrainedClassifier
from infssm.methods.core.views import ViewsClassifier
from infssm.models.features import find_classifier
from infssm.models.s4d import S4DMixer
from infssm.ssm import unwrap


class RecurrentS4D(nn.Module):
    """An S4D mixer as a recurrence in real arithmetic, for sequences of any length: [batch, tokens, channels].

    ONNX has no complex numbers, and the Fourier transform of the mixer would fix the length.
    """

    a_real: Tensor
    a_imag: Tensor
    """Discrete transition [channels, n/2]."""
    c_real: Tensor
    c_imag: Tensor
    """What the states are read out by [channels, n/2]: twice C times the discretised B."""

    def __init__(self, mixer: S4DMixer) -> None:
        super().__init__()
        transition, factor = (part.detach() for part in mixer.kernel.discretize())
        readout = 2 * mixer.kernel.complex_c().detach() * factor
        for name, value in (("a", transition), ("c", readout)):
            # Separate tensors, since the body of scan may not read views of one.
            self.register_buffer(f"{name}_real", value.real.clone())
            self.register_buffer(f"{name}_imag", value.imag.clone())
        self.D, self.output_linear = mixer.D, mixer.output_linear

    def forward(self, u: Tensor) -> Tensor:
        """u: [batch, tokens, channels]."""
        from torch._higher_order_ops.scan import scan

        a, b, c, d = self.a_real, self.a_imag, self.c_real, self.c_imag

        def step(state: list[Tensor], token: Tensor) -> tuple[list[Tensor], Tensor]:
            real, imag = state
            real, imag = a * real - b * imag + token.unsqueeze(-1), b * real + a * imag
            return [real, imag], (c * real - d * imag).sum(-1)

        zeros = u.new_zeros(u.shape[0], *a.shape)
        _, y = scan(step, [zeros, zeros.clone()], u.transpose(0, 1))
        y = F.gelu(y.transpose(0, 1) + self.D * u)
        projection = self.output_linear[0]
        return F.glu(F.linear(y, projection.weight.squeeze(-1), projection.bias), dim=-1)  # type: ignore[operator, arg-type]


def with_recurrent_s4d(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose S4D layers are recurrences; the model itself if it has none."""
    if any(isinstance(module, S4DMixer) for module in model.modules()):
        model = copy.deepcopy(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, S4DMixer):
                model.set_submodule(name, RecurrentS4D(module))
    return model


class _CdistWithoutBranches(TorchFunctionMode):
    """Euclidean distances by their definition: torch.cdist takes another way above 25 rows, which fixes the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.cdist and len(args) == 2 and options.get("p", 2.0) == 2.0:
            return (args[0].unsqueeze(-2) - args[1].unsqueeze(-3)).square().sum(-1).sqrt()
        return func(*args, **options)


Judge: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Features ``[n, d]`` to logits, probabilities ``[n, K]`` and whether a sample is like some class ``[n]``."""


class _Judging(nn.Module):
    """Replaces a classifier, and has all outputs of a judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :data:`Judge`."""
        logits, probabilities, known = self._judge(features)
        return logits, probabilities.float(), known


class Portable(nn.Module):
    """A model behind the steps that evaluation takes before it, reading logits of the first ``classes`` outputs.

    Args:
        model: model input ``[n, ...]`` to logits ``[n, K]``.
        before: what turns the input of the file into model input.
        classes: outputs beyond these belong to tasks that were not learnt; None keeps all.
        judge: of a learner; there are then three outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        before: nn.Module | None = None,
        classes: int | None = None,
        judge: Judge | None = None,
    ) -> None:
        super().__init__()
        self.model, self.before, self.classes = with_recurrent_s4d(model), before or nn.Identity(), classes
        if judge is not None:
            self.model = copy.deepcopy(model) if self.model is model else self.model
            place = find_classifier(unwrap(self.model))
            if isinstance(place.module, ViewsClassifier):
                place.module.fitted = _Judging(judge)
            else:
                place.replace(_Judging(judge))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Input of the file ``[n, ...]`` to logits ``[n, classes]``, with a judge to all its outputs."""
        with _CdistWithoutBranches():
            found: Tensor | tuple[Tensor, Tensor, Tensor] = self.model(self.before(x))
        return found[:, : self.classes] if isinstance(found, Tensor) and self.classes is not None else found


Form = Literal["onnx", "torch"]
TOLERANCE = 1e-4
"""Largest difference between logits of the file and of the model, relative to the largest logit (at least 1)."""

_USE = """import json, numpy, onnxruntime{imports}

session = onnxruntime.InferenceSession("model.onnx")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
{reading}
{result}
"""
_LABEL = 'print(classes[session.run(None, {{"{name}": {name}[None]}})[0].argmax()])'
_JUDGED = """logits, probabilities, known = session.run(None, {{"{name}": {name}[None]}})
best = probabilities[0].argmax()
print(classes[best], probabilities[0, best], "known" if known[0] else "unknown")"""


def export_classifier(
    classifier: TrainedClassifier,
    path: str | os.PathLike[str],
    to: Form = "onnx",
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> float:
    """Write the model of a run or a learner to ``path``; returns the largest difference of its logits from its own.

    An ONNX file takes raw input, any number of samples at once, and gives ``logits: [n, classes]``; that of a learner
    also calibrated ``probabilities: [n, classes]`` and ``known: [n]``, as :meth:`infssm.Learner.predict` does:

    - ``image``: uint8 [n, height, width, 3], or [n, height, width] where the model was trained on grey images, of any
      size; the graph resizes, crops and normalises as evaluation does;
    - ``sound``: float32 [n, samples] from -1 to 1, at the sampling rate in the metadata;
    - ``series``: float32 [n, time, width]; ``tokens``: int64 [n, time].

    Its metadata name the classes (``classes``, JSON), what the input is (``input``, JSON) and Python lines that use the
    file (``usage``). A ``torch`` program takes images as uint8 [n, channels, size, size], resized already, and all else
    in the same way.

    Args:
        classifier: what :func:`infssm.load` returns for a run; ``learner.classifier``.
        path: the file to write.
        to: ``"onnx"`` or ``"torch"`` (torch.export's ``.pt2``).
        progress: called with a line of text before each stage.
    """
    given = classifier.samples.exported(classifier.recipe)
    model = Portable(classifier.model, given.before, len(classifier.classes), classifier.judge)
    metadata = {"classes": json.dumps(classifier.classes), "usage": usage(classifier, path)}
    if given.about is not None:
        metadata["input"] = json.dumps(given.about)
    difference = export_model(
        model,
        given.example,
        path,
        to,
        metadata,
        name=given.name,
        outputs=("logits",) if classifier.judge is None else ("logits", "probabilities", "known"),
        any_length=given.resize is None,
        resize=given.resize if to == "onnx" else None,
        progress=progress,
    )
    for batch in given.raw if to == "onnx" else ():
        difference = max(difference, check_export(classifier, path, batch, batched=True))
    return difference


def usage(classifier: TrainedClassifier, path: str | os.PathLike[str]) -> str:
    """Python lines that classify a file with an exported model and without infssm."""
    given = classifier.samples.exported(classifier.recipe)
    result = (_LABEL if classifier.judge is None else _JUDGED).format(name=given.name)
    text = _USE.format(imports=given.imports, reading=given.reading, result=result)
    return text.replace("model.onnx", Path(path).name)


def check_export(
    classifier: TrainedClassifier,
    path: str | os.PathLike[str],
    samples: Iterable[SampleLike],
    *,
    batched: bool = False,
    tolerance: float = 1e-2,
) -> float:
    """Run an exported ONNX file on raw samples and compare it with ``classifier.predict``.

    Returns the largest difference of a logit, relative to the largest one; raises if that exceeds ``tolerance``,
    which allows for pixels that round to their neighbours. ``batched`` runs all samples, of one size, at once.
    """
    facts, largest = classifier.samples, 0.0
    run = _session(Path(path), facts.exported(classifier.recipe).name)
    for batch in [list(samples)] if batched else [[sample] for sample in samples]:
        expected = classifier.logits(classifier.transform(batch)).float().cpu()
        raw = torch.stack([facts.raw(sample) for sample in batch])
        difference = _difference(run(raw), expected, path)
        if difference > tolerance:
            named = f" for {batch[0]}" if isinstance(batch[0], (str, os.PathLike)) else ""
            raise InfssmError(f"the exported model {path} gives logits that are off by {difference:.1e}{named}")
        largest = max(largest, difference)
    return largest


def export_model(
    model: nn.Module,
    example: Tensor,
    path: str | os.PathLike[str],
    to: Form = "onnx",
    metadata: Mapping[str, str] | None = None,
    *,
    name: str = "image",
    outputs: Sequence[str] = ("logits",),
    any_length: bool = False,
    fixed: bool = False,
    resize: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> float:
    """Write any model to ``path``; returns the largest difference of its logits, see :data:`TOLERANCE`.

    Args:
        model: ``[n, ...]`` to logits ``[n, K]``.
        example: an input ``[n, ...]``, n > 1 unless ``fixed``.
        path: the file to write.
        to: ``"onnx"`` or ``"torch"`` (torch.export's ``.pt2``).
        metadata: stored in an ONNX file.
        name: name of the input in an ONNX file.
        outputs: names of the outputs in an ONNX file, the logits first.
        any_length: whether inputs are sequences ``[n, time, ...]``, which may be of any length.
        fixed: whether the file takes only inputs of the example's shape.
        resize: a graph in ONNX's text form whose output ``pixels`` is put before the model.
        progress: called with a line of text before each stage.
    """
    if to not in ("onnx", "torch"):
        raise ConfigError(f"to={to!r}: a model is exported to 'onnx' or to 'torch'")
    target = Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} to write {target.name} to")
    model = model.eval().cpu()
    portable = model if isinstance(model, Portable) else Portable(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        progress("tracing the model")
        axes = {} if fixed else dict.fromkeys((0, 1) if any_length else (0,), torch.export.Dim.DYNAMIC)
        portable(example)  # some heads compute what they measure distances by at the first call, which is not traceable
        program = torch.export.export(portable, (example,), dynamic_shapes=(axes,))
        progress("writing the file")
        if to == "onnx":
            content = _onnx(program, metadata or {}, name, outputs, resize)
        else:
            file = io.BytesIO()
            torch.export.save(program, file)
            content = file.getvalue()
    with atomic_file(target) as stream:
        stream.write(content)
    progress("comparing it with the model")
    largest = 0.0
    if to == "onnx" and resize is not None:  # the caller compares from raw images, which the graph resizes
        return largest
    run = _session(target, name) if to == "onnx" else torch.export.load(target).module()
    sizes = (example[:1], torch.cat([example, example.flip(0)]))  # other than that which the file was made with
    for batch in (example,) if fixed else sizes:
        with torch.no_grad():
            found, expected = (y if isinstance(y, Tensor) else y[0] for y in (run(batch), portable(batch)))
            largest = max(largest, _difference(found, expected, target))
    if largest > TOLERANCE:
        raise InfssmError(f"the exported model {target} gives logits that are off by {largest:.1e}")
    return largest


def _onnx(
    program: torch.export.ExportedProgram,
    metadata: Mapping[str, str],
    name: str,
    outputs: Sequence[str],
    resize: str | None,
) -> bytes:
    onnx: Any = require("onnx", install="pip install 'infssm[export]'")
    require("onnxscript", install="export to ONNX needs it: pip install 'infssm[export]'")
    level = logging.getLogger("onnxscript").level
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    try:
        written = torch.onnx.export(
            program,
            input_names=["pixels" if resize else name],
            output_names=list(outputs),
            dynamo=True,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error  # the exporter's own words are how to report it; the first cause is the operator
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).strip().splitlines()[0]
        raise ConfigError(f"the model cannot be written as ONNX ({reason}); --to torch takes every model") from error
    finally:
        logging.getLogger("onnxscript").setLevel(level)
    assert written is not None
    proto = written.model_proto
    if resize is not None:
        first = onnx.parser.parse_model(resize).graph
        nodes = [*first.node, *proto.graph.node]
        del proto.graph.node[:], proto.graph.input[:]
        proto.graph.node.extend(nodes)
        proto.graph.input.extend(first.input)
        used = {name for node in first.node for name in node.input}  # onnxruntime warns of constants that are not
        proto.graph.initializer.extend(constant for constant in first.initializer if constant.name in used)
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()
    return content


def _difference(found: Tensor, expected: Tensor, path: str | os.PathLike[str]) -> float:
    """Largest difference of two batches of logits [n, K], relative to the largest logit (at least 1)."""
    known = torch.isfinite(expected)  # classes that were not learnt score -inf
    if not torch.equal(known, torch.isfinite(found)):
        raise InfssmError(f"the exported model {path} has other logits than the model it was exported from")
    scale = max(1.0, float(expected[known].abs().max()))
    return float((found - expected)[known].abs().max()) / scale


def _session(path: Path, name: str) -> Callable[[Tensor], Tensor]:
    """An ONNX file as a function of its input ``name``."""
    onnxruntime: Any = require("onnxruntime", install="checking an ONNX file needs it: pip install 'infssm[export]'")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])
