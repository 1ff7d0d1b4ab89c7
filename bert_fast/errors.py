"""Exceptions of the public API.

Bad arguments raise the built-in `TypeError` and `ValueError`; these classes name what the built-in ones cannot.
"""

__all__ = ["BackendError", "CheckpointError", "DerivativeError", "SourceError", "StoreError", "TrainingError"]


class BackendError(RuntimeError):
    """A back-end was asked for by name and cannot run the call; the message lists every reason."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, truncated or does not fit the model; the message names the file and the keys."""


class DerivativeError(NotImplementedError):
    """A derivative was asked for that an op has not: in forward mode, a second one; the message names the op."""


class SourceError(ValueError):
    """A text cannot be read as asked for; the message names the file and the byte, line or row."""


class StoreError(RuntimeError):
    """A token store is missing, incomplete or damaged, or was made in another way; the message names the directory."""


class TrainingError(RuntimeError):
    """A run cannot go on; the message says at which step, why, what was kept, and what to do."""
