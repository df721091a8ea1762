"""Replay buffers, and the bases that replay."""
