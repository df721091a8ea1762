"""Fewer states: what compression costs, beside other scores and a small model from scratch."""
