"""The one visible training loop, with optimiser, schedule, checkpoints and devices."""
