"""What tells a fused module from transformers' own."""

from collections.abc import Callable, Iterator
from typing import Any

from bert_fast.huggingface.family import Family


class Fused:
    """Base of all classes that take the place of one of transformers', see `classes`.

    fused_original: the class of transformers that was there; fused_family: what it is of; fused_forward: the method
    that `forward_for` made; fused_theirs: transformers' own, None where `forward_for` made none. in_bert: the name of
    the head of BERT whose labels a model takes, "" without one; `classes` makes it of the record's name where the class
    does not say.
    """

    fused_original: type
    fused_family: Family
    fused_forward: Callable[..., Any]
    fused_theirs: Callable[..., Any] | None = None
    in_bert = ""

    @classmethod
    def is_replaced(cls) -> bool:
        """Whether `forward` of the class of transformers was replaced, there, before or after it was fused."""
        theirs: Any = cls.fused_theirs
        return theirs is not None and cls.fused_original.forward is not theirs  # type: ignore[attr-defined]

    @classmethod
    def forward_for(cls, original: type, family: Family) -> Callable[..., Any] | None:
        """The forward method in place of that of `original`, with its signature; None: the class has one already."""
        return None


class FusedUncalled(Fused):
    """Base of parts that the packed path reads and never calls: no hook may be on them, not even a harmless one."""


class FusedAround(Fused):
    """Base of those that take the place of a model around one of transformers'."""

    def reasons_around(self) -> Iterator[str]:
        """Why calls leave the packed path where the encoder itself does not."""
        raise NotImplementedError


def part(module: Any, path: str) -> Any:
    """What lies at a path of attributes, as in `Family.names`.

    Without the "?", it is `operator.attrgetter`, which torch.compile cannot trace.
    """
    for name in path.removesuffix("?").split("."):
        module = getattr(module, name, None) if path.endswith("?") else getattr(module, name)
    return module


def runs(module: Any, computing: type[Fused]) -> bool:
    """Whether a call of a module runs the forward that `computing` made, and no other in its place."""
    cls = type(module)
    return issubclass(cls, computing) and cls.forward is cls.fused_forward and "forward" not in module.__dict__  # type: ignore[attr-defined]
