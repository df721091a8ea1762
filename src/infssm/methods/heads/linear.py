"""The classifier that the model came with, trained like the rest of it."""

from __future__ import annotations

from typing import ClassVar

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, Head


@register_method
class Linear(Head):
    """The model's own classifier, trained with it; the head of a method that names none."""

    name = "linear"
    online: ClassVar[bool] = True
    supported_data: ClassVar[frozenset[str]] = ALL_DATA
