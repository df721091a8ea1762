"""Any method as an Avalanche plugin.

Avalanche is not a dependency and installs dozens of packages, so the tests run this plugin with stand-ins for the hooks
and attributes it uses. Run once with Avalanche 0.6.0 itself, it gave the weights of a plain loop.
"""

from __future__ import annotations

from typing import Any

from infssm._optional import require

core = require("avalanche.core", install="pip install avalanche-lib")


class MethodPlugin(core.SupervisedPlugin):  # type: ignore[misc, name-defined]
    """Adds an infssm method's penalty to a strategy: ``Naive(..., plugins=[MethodPlugin(method)])``.

    ``method`` comes from ``infssm.attach(strategy_model, name)``; experiences are its tasks.
    """

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the task of this experience."""
        self.method.begin_task(strategy.experience.current_experience)

    def before_backward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the penalty of the forward that formed the loss."""
        strategy.loss = strategy.loss + self.method.penalty(strategy.mb_x)

    def after_update(self, strategy: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Notify the method of the optimizer step."""
        self.method.after_step()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """End the task of this experience."""
        self.method.end_task(strategy.experience.current_experience)
