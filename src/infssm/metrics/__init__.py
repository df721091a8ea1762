"""The accuracy matrix and everything computed from it."""
