"""What a run needs to resume: checkpoints, its progress, the states of random generators."""
