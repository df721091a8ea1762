"""Build a :class:`Method` from a name such as ``er+inf-ssm`` and flat or dotted options."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from torch import nn

from infssm._catalogue import Text
from infssm._modality import modality_named
from infssm._registry import Registry, shorten, suggest
from infssm.errors import ConfigError
from infssm.methods.core.context import Context, Transforms
from infssm.methods.core.contract import Base, Component, ComponentConfig, Head, Regularizer
from infssm.methods.core.method import Method, StatesConfig
from infssm.ssm import coverage

C = TypeVar("C", bound=type[Component])
components: Registry[type[Component]] = Registry("method", group="infssm.methods")


class MethodText(NamedTuple):
    """The description of a method.

    ``role`` is base, regularizer or head; ``options`` are (name, default, meaning).
    """

    name: str
    role: str
    summary: str
    details: str
    paper: str
    options: tuple[tuple[str, str, str], ...]


def register_method(cls: C) -> C:
    """Class decorator: make a :class:`Base`, :class:`Regularizer` or :class:`Head` available under its ``name``."""
    components.register(cls.name)(cls)
    return cls


def list_methods() -> list[str]:
    """Names of all bases, regularizers and heads; join one base, regularizers and one head with ``+``."""
    return list(components)


def describe_method(name: str) -> str:
    """One line about a single method."""
    return components.describe(name)


def explain_method(name: str) -> MethodText:
    """Role, description, paper and options of a single method, for lists and documentation."""
    cls = components[name]
    text = Text.of(cls.__doc__)
    role = "base" if issubclass(cls, Base) else "head" if issubclass(cls, Head) else "regularizer"
    schemas: list[type[ComponentConfig]] = [cls.Config]
    if issubclass(cls, Regularizer) and cls.needs_states:
        schemas.append(StatesConfig)
    options = [(key, field) for schema in schemas for key, field in schema.model_fields.items()]
    return MethodText(
        name,
        role,
        *text,
        tuple(
            (key, str(field.get_default(call_default_factory=True)), field.description or "") for key, field in options
        ),
    )


def split_name(name: str) -> list[str]:
    """``"er+inf-ssm"`` to ``["er", "inf-ssm"]``; a plus that no name follows belongs to the name before (``der++``)."""
    parts: list[str] = []
    for part in name.split("+"):
        if part or not parts:
            parts.append(part)
        else:
            parts[-1] += "+"
    return parts


def canonical_name(name: str) -> str:
    """The canonical spelling: base, regularizers by name, head; ``linear``, and ``seq`` beside others, are omitted."""
    base, regularizers, head = parse_name(name)
    named = [r.name for r in regularizers] + ([head.name] if head is not components["linear"] else [])
    return "+".join([*([] if named and base is components["seq"] else [base.name]), *named])


class Composition(NamedTuple):
    """The components that a name stands for."""

    base: type[Base]
    regularizers: tuple[type[Regularizer], ...]
    head: type[Head]

    @property
    def classes(self) -> list[type[Component]]:
        """All of them: base, regularizers, head."""
        return [self.base, *self.regularizers, self.head]


@cache
def parse_name(name: str) -> Composition:
    """The components of a name, regularizers sorted; no base means ``seq``, no head ``linear``."""
    classes = [components[part] for part in split_name(name)]
    if len({c.name for c in classes}) < len(classes):
        raise ConfigError(f"{name!r} names a method twice")
    bases: list[type[Base]] = [c for c in classes if issubclass(c, Base)]
    heads: list[type[Head]] = [c for c in classes if issubclass(c, Head)]
    for found, what in ((bases, "base method can form the loss"), (heads, "head can make the logits")):
        if len(found) > 1:
            raise ConfigError(f"{name!r}: only one {what}, got {' and '.join(c.name for c in found)}")
    base, head = (*bases, components["seq"])[0], (*heads, components["linear"])[0]
    assert issubclass(base, Base)
    assert issubclass(head, Head)
    regularizers = tuple(sorted((c for c in classes if issubclass(c, Regularizer)), key=lambda c: c.name))
    for one, other in itertools.combinations(regularizers, 2):
        if one.family is not None and one.family == other.family:  # their sum is one of them with another weight
            raise ConfigError(
                f"{name!r}: {one.name} and {other.name} hold the same states; choose one and set its weight"
            )
    refusal = base.why_no_regularizers
    if refusal is None and (base.joint or base.freezes):  # a base of a plugin may give no reason
        refusal = f"{base.name} leaves nothing to regularize"
    if regularizers and refusal is not None:
        raise ConfigError(f"{name!r}: {refusal}")
    if base.own_classifier and not head.fitted and head in classes:
        raise ConfigError(f"{name!r}: {base.name} trains a classifier of its own; leave {head.name} out")
    return Composition(base, regularizers, head)


def build_method(
    model: nn.Module,
    name: str,
    *,
    num_classes: int | None = None,
    num_tasks: int | None = None,
    task_sizes: Sequence[int] | None = None,
    data_kind: str = "images",
    domains: bool = False,
    transforms: Transforms | None = None,
    own_loop: bool = False,
    regularizers: bool = True,
    seed: int = 0,
    **options: Any,
) -> Method:
    """Compose the named method on ``model``; see :func:`infssm.attach` for the options.

    ``seed`` is the run's: the draws of replay buffers follow from it. ``task_sizes`` are the classes of each task;
    without them tasks share the classes equally. ``data_kind`` is what the samples are (see :func:`check_suits`) and
    ``domains`` whether tasks are new domains. ``transforms`` make model input of stored raw images again.
    ``regularizers=False`` leaves them out, where the model only predicts; their options are checked all the same.
    """
    base_class, named, head_class = parse_name(name)
    regularizer_classes = named if regularizers else ()
    configs = method_options(name, options)
    check_suits(name, data_kind, domains=domains)
    context = Context(
        model,
        num_classes=getattr(model, "num_classes", None) if num_classes is None else num_classes,
        num_tasks=num_tasks,
        task_sizes=None if task_sizes is None else tuple(task_sizes),
        modality=modality_named(data_kind),
        seed=seed,
        transforms=transforms,
        states_options=configs["states"].model_dump(),
        own_loop=own_loop,
    )
    context.module = base_class.prepare(configs[base_class.name], context)
    head_class.prepare(configs[head_class.name], context)
    context.record(
        states=any(cls.needs_states for cls in regularizer_classes),
        features=any(cls.needs_features for cls in regularizer_classes),
        logits=any(cls.needs_logits for cls in regularizer_classes),
    )
    base = base_class(configs[base_class.name], context)
    context.columns = base.columns
    head = head_class(configs[head_class.name], context)
    built = [cls(configs[cls.name], context) for cls in regularizer_classes]
    return Method(canonical_name(name), context, base, built, head)


def check_suits(name: str, data_kind: str, *, domains: bool) -> None:
    """Raise for a method that does not support a stream; the error names those that do.

    ``data_kind``: ``images``, ``series``, ``tokens`` (with classes), ``language`` or ``regression``. ``domains``:
    whether tasks are new domains of the same classes.
    """
    modality = modality_named(data_kind)

    def suits(component: type[Component]) -> bool:
        return modality.supported_by(component.supported_data) and (component.supports_domains or not domains)

    bad = [component for component in parse_name(name).classes if not suits(component)]
    if not bad:
        return
    domains_alone = domains and modality.supported_by(bad[0].supported_data)
    what = f"{data_kind}{' whose tasks are new domains' if domains_alone else ''}"
    known = ", ".join(other for other in components if suits(components[other]))
    why = ""
    if modality.scoring == "numbers" and not domains_alone:
        why = ", whose targets are numbers: it needs classes, or images"
    raise ConfigError(f"method {bad[0].name!r} does not work on {what}{why}; these do: {known}")


def attach(model: nn.Module, name: str = "inf-ssm-exact", **options: Any) -> Method:
    """Attach a method against forgetting to ``model``, for your own training loop.

    ```python
    method = infssm.attach(model, "inf-ssm-exact")
    for task in stream:
        method.begin_task(task)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + method.penalty(x)  # 0 on the first task
            loss.backward(); optimizer.step(); optimizer.zero_grad(); method.after_step()
        method.end_task(task)
    ```

    Works with any model whose state space layers are known (:class:`infssm.NoSSMLayersError` otherwise). ``options``
    are the fields of the method's components: ``weight=1e3``, ``layers=12``; where several components share a field
    name, prefix it with the component: ``**{"ewc.weight": 1e3, "lwf-ac": {"weight": 1e4}}``.

    ``x`` of ``penalty`` may be a mapping of keyword arguments. Methods that measure on data need a loader:
    ``end_task(task, loader)``. To continue within a task, build the same method on the restored model and call
    ``load_state_dict`` instead of ``begin_task``.
    """
    composition = parse_name(name)
    if not all("images" in component.supported_data for component in composition.classes):
        options.setdefault("data_kind", "language")
    if composition.base.joint:
        raise ConfigError(
            f"{name!r} trains on the data of all tasks at once, so there is nothing to attach in your own loop: "
            "train on all data without a method, or let infssm.run do it with method=joint"
        )
    method = build_method(model, name, own_loop=True, **options)
    texts = method.warnings()
    if any(getattr(component, "needs_states", False) for component in composition.classes):
        found = coverage(model)
        if found.has_adapters and (found.missed or any(layer.ignored for layer in found.layers.values())):
            texts = [*texts, found.summary()]
    for warning in texts:
        warnings.warn(warning, UserWarning, stacklevel=2)
    return method


def method_options(name: str, options: Mapping[str, Any]) -> dict[str, ComponentConfig]:
    """The validated options of every component that a method's name stands for, and those of ``states``.

    ``options`` are flat (``weight``), by component (``ewc.weight``), or mappings of a component's options.
    """
    classes = parse_name(name).classes
    schemas: dict[str, type[ComponentConfig]] = {c.name: c.Config for c in classes} | {"states": StatesConfig}
    values: dict[str, dict[str, Any]] = {owner: {} for owner in schemas}
    for key, value in options.items():
        owner, dot, field = key.rpartition(".")
        if key in schemas and isinstance(value, Mapping):
            values[key] |= value
        elif dot and owner in schemas:
            values[owner][field] = value
        else:
            owners = [owner for owner, schema in schemas.items() if key in schema.model_fields]
            if not owners:
                known = {field for schema in schemas.values() for field in schema.model_fields}
                raise ConfigError(f"method {name!r} has no option {shorten(repr(key))}{suggest(key, known)}")
            if len(owners) > 1:
                raise ConfigError(
                    f"option {key!r} of {name!r} belongs to {' and '.join(owners)}: write {owners[0]}.{key}"
                )
            values[owners[0]][key] = value
    configs = {}
    for owner, schema in schemas.items():
        for key in values[owner]:
            if key not in schema.model_fields:
                hint = suggest(key, schema.model_fields)
                raise ConfigError(f"method {owner!r} has no option {shorten(repr(key))}{hint}")
        try:
            configs[owner] = schema(**values[owner])
        except ValidationError as error:
            lines = [
                f"{owner}.{'.'.join(map(str, e['loc']))}: {shorten(e['msg'], 300)} (got {shorten(repr(e['input']))})"
                for e in error.errors()
            ]
            raise ConfigError("; ".join(lines)) from None
    return configs
