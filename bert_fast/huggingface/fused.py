"""What tells a fused module from transformers' own."""

from collections.abc import Iterator

__all__ = ["Fused", "FusedAround"]


class Fused:
    """Base of all classes that take the place of one of transformers', see `classes`."""


class FusedAround(Fused):
    """Base of those that take the place of a model around one of transformers'."""

    def reasons_around(self) -> Iterator[str]:
        """Why calls leave the packed path where the encoder itself does not."""
        raise NotImplementedError
