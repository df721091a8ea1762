"""Replay buffers: what they store and how they choose."""
