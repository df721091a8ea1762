"""docs/results/digits.md, digits-replay.md and cifar.md: every method on small streams."""
