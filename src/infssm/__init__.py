"""infssm: learn task after task with state space models, without forgetting."""
