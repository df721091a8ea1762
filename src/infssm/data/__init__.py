"""Data sets, splits saved as data, task streams, transforms."""
