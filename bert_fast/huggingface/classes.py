"""Classes that take the place of transformers' own on objects that exist: the same data, another forward.

`object.__class__ = fused_class(type(object))` fuses, `original_class` is the way back. A fused class is a subclass of
the one it replaces and goes by its name, so `isinstance`, saved configurations, messages and hooks see no difference.
Which class computes in place of which, the records of `families` say; they are read when a class of theirs is met, so
that no library of transformers is imported for its own sake. A class that somebody derived from transformers' gets a
fused class between itself and its base:

    transformers' BertModel          <- its fused class (made here, of FusedModel and the record)
    class Sub(BertModel), theirs     <- Sub(Sub, the fused class of BertModel)    (made here, once)

so what Sub overrides stays in force, and what it leaves to its base is fast. `around` says the same of models of
sentence-transformers, which is never imported from here.
"""

import copyreg
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from bert_fast.huggingface.containers import FusedContainer, clear_sites, set_sites
from bert_fast.huggingface.families import LIBRARIES
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.fused import Fused, part
from bert_fast.huggingface.models import FusedModel
from bert_fast.huggingface.rotary import FusedRotaryModel
from bert_fast.modules.encoder import PackedEncoder
from bert_fast.modules.originals import is_of
from bert_fast.modules.projections import JoinedMemory


class _Replacement:
    """Copies and pickles of a fused object are fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds classes by their names, and these are the original's.
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        original = original_class(type(self))
        if original is None or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return _new, (original, *reduced[1][1:]), *reduced[2:]


class _ReplacementModel(_Replacement):
    """What the class of a fused model makes is fused too (`type(model).from_pretrained`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        swap_in(self)  # type: ignore[arg-type]


class _ReplacementEncoder(_ReplacementModel):
    """One of transformers'. sentence-transformers prints its models into the model cards that it saves."""

    def extra_repr(self) -> str:
        """What `print(model)` shows first, so that a fused model is told from an untouched one."""
        return "\n".join(filter(None, ("fused by bert_fast", super().extra_repr())))  # type: ignore[misc]


_fused: dict[type, type] = {}  # class -> its fused class
_originals: dict[type, type] = {}  # the other way
_models: set[type] = set()  # transformers' own classes of whole models
_read: set[str] = set()  # those of LIBRARIES whose classes are in these
_lock = threading.RLock()


def known(library: str) -> Iterator[tuple[str, type, type]]:
    """Of one of `LIBRARIES`: the record's name of a class, transformers' class, what computes in its place.

    What this version of transformers does not have is left out.
    """
    try:
        theirs, family = importlib.import_module(library), LIBRARIES[library]
    except ModuleNotFoundError as error:
        if error.name is None or not library.startswith(error.name):
            raise
        return
    for pattern, computing in {**family.models, **family.parts}.items():
        original = getattr(theirs, pattern.replace("*", family.libraries[library]), None)
        if original is not None:
            yield pattern, original, computing


def all_models() -> list[type]:
    """transformers' classes of whole models, of every family; imports them."""
    return [cls for library, family in LIBRARIES.items() for name, cls, _ in known(library) if name in family.models]


def _read_libraries(classes: Iterable[type]) -> None:
    """Makes the fused classes of the families that classes, or what they are derived from, are of."""
    with _lock:
        for library in {ancestor.__module__ for cls in classes for ancestor in cls.__mro__} & (
            LIBRARIES.keys() - _read
        ):
            family = LIBRARIES[library]
            for name, original, computing in known(library):
                is_model = name in family.models
                replacement = _ReplacementEncoder if is_model else _Replacement
                attributes = _attributes(family, name, original, computing)
                _put(original, (replacement, computing, original), computing.__doc__, attributes)
                if is_model:
                    _models.add(original)
            _read.add(library)


def _attributes(family: Family, name: str, original: type, computing: Any) -> dict[str, Any]:
    """What a fused class has beside its bases."""
    names = dict(family.names.get(name, {}))
    attributes: dict[str, Any] = {"fused_family": family, "fused_original": original}
    if issubclass(computing, FusedModel):
        attributes["attention_dropout"] = family.attention_dropout
    if name in family.models:
        names["inner"] = family.inner
        if family.padding_idx is not None:
            names["numbers_behind"] = family.padding_idx
        if "For" in name and not computing.in_bert:
            attributes["in_bert"] = name.replace("*", "Bert")
    forward = computing.forward_for(original, family)
    if forward is not None:
        theirs = original.forward  # type: ignore[attr-defined]
        is_own = is_of(theirs, "transformers")
        attributes |= {
            "forward": forward, "fused_forward": forward, "fused_theirs": staticmethod(theirs if is_own else _replaced)
        }  # fmt: skip
    missing = dict.fromkeys(family.missing.get(name, ()))
    return attributes | missing | {ours: property(_getter(theirs)) for ours, theirs in names.items()}


def _replaced(*args: Any, **kwargs: Any) -> None:
    """In place of a method of transformers that was another's already when the fused class was made."""


def _getter(path: str) -> Callable[[Any], Any]:
    return lambda module: part(module, path)


def _put(
    cls: type, bases: tuple[type, ...], doc: str | None, attributes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Makes the fused class of `cls`, which goes by its name."""
    metaclass: Any = type(cls)
    fused: type = metaclass(cls.__name__, bases, {**attributes, "__doc__": doc})
    fused.__qualname__ = cls.__qualname__
    fused.__module__ = cls.__module__
    _fused[cls], _originals[fused] = fused, cls


def around() -> dict[type, type]:
    """Models of sentence-transformers and what computes in their place; none unless version 6 or later is loaded."""
    library = sys.modules.get("sentence_transformers")
    if library is None or int(getattr(library, "__version__", "0").split(".")[0]) < 6:
        return {}
    from bert_fast.huggingface import sentence_models as models

    known: dict[type, type] = {
        library.SentenceTransformer: models.FusedSentenceTransformer,
        library.CrossEncoder: models.FusedCrossEncoder,
        library.SparseEncoder: models.FusedSparseEncoder,
    }
    if hasattr(library, "MultiVectorEncoder"):
        from bert_fast.huggingface.multi_vector import FusedMultiVectorEncoder

        known[library.MultiVectorEncoder] = FusedMultiVectorEncoder
    return known


def fused_class(cls: type) -> type | None:
    """The fused class of `cls`: itself where it is one, None where nothing in its ancestry has one."""
    if issubclass(cls, Fused):
        return cls
    with _lock:
        _read_libraries([cls])
        for original, computing in around().items():
            if original not in _fused:
                _put(original, (_ReplacementModel, computing), computing.__doc__)
        if cls not in _fused:
            base = next((ancestor for ancestor in cls.__mro__ if ancestor in _fused), None)
            if base is None:
                return None
            _put(cls, (cls, _fused[base]), cls.__doc__)
        return _fused[cls]


def original_class(cls: type) -> type | None:
    """What a fused class replaces; None where `cls` is none (classes that FSDP2 derives from one are none)."""
    return _originals.get(cls)


def swap_in(model: nn.Module) -> bool:
    """Fuses every model of a family inside, and the models around it; whether there is one (fused before or now)."""
    modules = list(model.modules())
    _read_libraries({type(module) for module in modules})
    if not any(
        issubclass(_fused[cls], FusedModel) for module in modules for cls in type(module).__mro__ if cls in _models
    ):
        return False
    models = (*_models, *around())
    for module in modules:
        # A module of a class that somebody derived from transformers' stays, and is a reason, see `reasons`.
        if type(module) in _fused or isinstance(module, models):
            _change_class(module, fused_class(type(module)))
    for encoder in encoders(model):
        set_sites(encoder)
    return True


def swap_out(model: nn.Module) -> None:
    """Gives every fused module inside the class that it had, and its parameters ordinary memory."""
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    for module in fused:
        if original_class(type(module)) is None:
            raise ValueError(f"model: expected classes that fuse made, got {type(module).__name__} derived from one")
    for joined in _joined(model):
        joined._separate_memory()
    for encoder in encoders(model):
        vars(encoder).pop("graphs", None)
    for module in fused:
        clear_sites(module)
        _change_class(module, original_class(type(module)))


def encoders(model: nn.Module) -> list[Any]:
    """The fused stacks of layers inside; those of models without a module for them are made for the call."""
    found: list[Any] = []
    for one in model.modules():
        if isinstance(one, FusedContainer) and isinstance(one, PackedEncoder):
            found.append(one)
        elif isinstance(one, FusedRotaryModel):
            found.append(one.encoder)
    return found


def join_projections(model: nn.Module) -> None:
    """Puts query, key and value of every fused attention side by side in memory, and gate and up of a gated MLP."""
    for joined in _joined(model):
        joined._join_memory()


def _joined(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    return [one for one in modules if isinstance(one, FusedContainer) and isinstance(one, JoinedMemory)]


def _change_class(module: nn.Module, cls: type | None) -> None:
    if cls is not None:
        module.__class__ = cls


def _new(original: type, *arguments: Any) -> Any:
    """An empty object of the fused class, for pickle and copy to fill."""
    cls = fused_class(original)
    assert cls is not None
    return cls.__new__(cls, *arguments)
