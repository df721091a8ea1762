"""What a run needs to go on where it stopped: checkpoints, where it stands, random numbers."""
