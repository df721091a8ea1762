"""The command line: one small file per sub-command."""
