"""Every error infssm raises on purpose, with the exit code the command line gives it."""


class InfssmError(Exception):
    """Base class of all errors that the caller can fix; the message names the fix."""

    exit_code = 1


class ConfigError(InfssmError):
    """A configuration, name, override or argument that cannot be used."""

    exit_code = 2


class DataError(InfssmError):
    """Data that is missing, unreadable, or not what the run was started with."""

    exit_code = 3


class MissingDataError(DataError):
    """Data that is missing at the place where it was searched."""


class DivergedError(InfssmError):
    """Training produced a value that is not finite."""

    exit_code = 4


class CheckpointError(InfssmError):
    """A checkpoint that is truncated, of another architecture, or not a checkpoint."""

    exit_code = 2


class NoSSMLayersError(InfssmError):
    """The model has no state space layer that infssm knows."""

    exit_code = 2
