"""How weights move: the optimizer, its learning rate, and a guard against steps that are not finite."""

from infssm.learner.optim.optimizer import build_optimizer, decay_groups, set_learning_rate
from infssm.learner.optim.schedule import learning_rate, task_lr

__all__ = ["build_optimizer", "decay_groups", "learning_rate", "set_learning_rate", "task_lr"]
