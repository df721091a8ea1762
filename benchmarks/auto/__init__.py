"""docs/results/auto.md: the automatic weight."""
