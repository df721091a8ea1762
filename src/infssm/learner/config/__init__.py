"""The configuration of a run: its fields, and how YAML, mappings and overrides become one."""
