"""docs/results/cold-start.md: features that go on learning from scratch."""
