"""docs/results/heads.md: features and heads without stored images."""
