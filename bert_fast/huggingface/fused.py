"""What tells a fused module from transformers' own."""

__all__ = ["Fused"]


class Fused:
    """Base of all classes that take the place of one of transformers', see `classes`."""
