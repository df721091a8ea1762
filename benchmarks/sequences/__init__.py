"""docs/results/sequences.md: language, speech and pixels."""
