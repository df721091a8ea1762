"""`export`: a model as a file that runs without infssm, from raw input, checked against the model it came from."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from infssm._files import atomic_file
from infssm._optional import require
from infssm.data import ImageFacts
from infssm.errors import ConfigError, InfssmError
from infssm.learner.portable import LogEnergies, Normalize, Portable, Waveform, resizing_graph
from infssm.learner.predict import TrainedClassifier
from infssm.learner.reading import SampleLike, open_image, sequence_input, sound_input

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
_READ_IMAGE = 'image = numpy.asarray(ImageOps.exif_transpose(Image.open("photo.jpg")).convert("{mode}"))'
_READ_SOUND = """with wave.open("sound.wav") as file:
    assert file.getparams()[:3] == (1, 2, {rate}), "convert it to one channel, 16 bits, {rate} samples per second"
    sound = numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(numpy.float32) / 32768"""
_READ_SERIES = '{name} = numpy.load("{name}.npy").astype(numpy.{dtype})  # {shape}'


class _Plan:
    """How a model becomes a file: names of input and outputs, the steps before the model, how to use the file."""

    def __init__(self, classifier: TrainedClassifier) -> None:
        facts, draw = classifier.samples, torch.Generator().manual_seed(0)
        self.classifier = classifier
        self.before: nn.Module | None = None
        self.resize: str | None = None
        self.metadata = {"classes": json.dumps(classifier.classes)}
        imports = ""
        if isinstance(facts, ImageFacts):
            assert classifier.recipe is not None
            size = classifier.recipe.size
            self.name, mode = "image", "RGB" if facts.channels == 3 else "L"
            self.before, self.resize = Normalize(classifier.recipe), resizing_graph(facts, classifier.recipe)
            self.example = torch.randint(256, (2, facts.channels, size, size), dtype=torch.uint8, generator=draw)
            self.metadata["input"] = json.dumps({"mode": mode, "size": size})
            imports, reading = "\nfrom PIL import Image, ImageOps", _READ_IMAGE.format(mode=mode)
        elif facts.rate is not None:
            self.name, self.before = "sound", Waveform() if facts.bands is None else LogEnergies(facts)
            self.example = torch.randn(2, facts.rate // 4, generator=draw)
            self.metadata["input"] = json.dumps({"rate": facts.rate})
            imports, reading = ", wave", _READ_SOUND.format(rate=facts.rate)
        elif facts.kind == "tokens":
            self.name, self.example = "tokens", torch.randint(facts.width, (2, 24), generator=draw)
            reading = _READ_SERIES.format(name="tokens", dtype="int64", shape="[time]")
        else:
            self.name, self.example = "series", torch.randn(2, 24, facts.width, generator=draw)
            reading = _READ_SERIES.format(name="series", dtype="float32", shape=f"[time, {facts.width}]")
        self.outputs = ("logits",) if classifier.judge is None else ("logits", "probabilities", "known")
        result = (_LABEL if classifier.judge is None else _JUDGED).format(name=self.name)
        self.usage = _USE.format(imports=imports, reading=reading, result=result)

    def raw(self, sample: SampleLike) -> Tensor:
        """A file or other sample as the ONNX file takes it, a batch of one."""
        facts = self.classifier.samples
        if isinstance(facts, ImageFacts):
            return torch.from_numpy(np.array(open_image(sample, facts)))[None]
        return (sound_input(sample, facts) if facts.rate is not None else sequence_input(sample, facts))[None]


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
    plan = _Plan(classifier)
    model = Portable(classifier.model, plan.before, len(classifier.classes), classifier.judge)
    difference = export_model(
        model,
        plan.example,
        path,
        to,
        {**plan.metadata, "usage": usage(classifier, path)},
        name=plan.name,
        outputs=plan.outputs,
        any_length=plan.resize is None,
        resize=plan.resize if to == "onnx" else None,
        progress=progress,
    )
    if plan.resize is not None and to == "onnx":
        facts, size, colours = classifier.samples, plan.example.shape[-1], plan.example.shape[1]
        assert isinstance(facts, ImageFacts)
        draw = torch.Generator().manual_seed(1)
        for shape in ((size, size), (size + 7, 2 * size + 3), (facts.height or 2 * size, facts.width or 2 * size)):
            images = torch.randint(256, (3, *shape, colours), dtype=torch.uint8, generator=draw)
            difference = max(difference, check_export(classifier, path, images, batched=True))
    return difference


def usage(classifier: TrainedClassifier, path: str | os.PathLike[str]) -> str:
    """Python lines that classify a file with an exported model and without infssm."""
    return _Plan(classifier).usage.replace("model.onnx", Path(path).name)


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
    plan, largest = _Plan(classifier), 0.0
    run = _session(Path(path), plan.name)
    for batch in [list(samples)] if batched else [[sample] for sample in samples]:
        expected = classifier.logits(classifier.transform(batch)).float().cpu()
        raw = torch.cat([plan.raw(sample) for sample in batch])
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
