"""Classes that take the place of transformers' own on objects that exist: the same data, another forward.

`object.__class__ = fused_class(type(object))` fuses, `original_class` is the way back. A fused class is a subclass of
the one it replaces and goes by its name, so `isinstance`, saved configurations, messages and hooks see no difference.
`MODELS` and `PARTS` say which class computes in place of which. A class that somebody derived from transformers' gets a
fused class between itself and its base:

    transformers' BertModel          <- FusedBertModel (in `models.py`) <- its fused class (made here)
    class Sub(BertModel), theirs     <- Sub(Sub, the fused class of BertModel)    (made here, once)

so what Sub overrides stays in force, and what it leaves to its base is fast. `around` says the same of models of
sentence-transformers, which is never imported from here.
"""

import copyreg
import sys
import threading
from typing import Any

from torch import nn
from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface import containers, heads, token_heads, word_heads
from bert_fast.huggingface.containers import FusedContainer, clear_sites, set_sites
from bert_fast.huggingface.fused import Fused
from bert_fast.huggingface.models import FusedBertModel
from bert_fast.modules.encoder import PackedEncoder
from bert_fast.modules.projections import JoinedProjections

__all__ = ["MODELS", "PARTS", "around", "fused_class", "join_projections", "original_class", "swap_in", "swap_out"]

MODELS: dict[type, type] = {
    hf.BertModel: FusedBertModel,
    hf.BertForMaskedLM: word_heads.FusedBertForMaskedLM,
    hf.BertForMultipleChoice: heads.FusedBertForMultipleChoice,
    hf.BertForNextSentencePrediction: heads.FusedBertForNextSentencePrediction,
    hf.BertForPreTraining: word_heads.FusedBertForPreTraining,
    hf.BertForQuestionAnswering: token_heads.FusedBertForQuestionAnswering,
    hf.BertForSequenceClassification: heads.FusedBertForSequenceClassification,
    hf.BertForTokenClassification: token_heads.FusedBertForTokenClassification,
    hf.BertLMHeadModel: word_heads.FusedBertLMHeadModel,
}
PARTS: dict[type, type] = {
    hf.BertAttention: containers.FusedBertAttention,
    hf.BertEmbeddings: containers.FusedBertEmbeddings,
    hf.BertEncoder: containers.FusedBertEncoder,
    hf.BertIntermediate: containers.FusedBertIntermediate,
    hf.BertLMPredictionHead: containers.FusedBertLMPredictionHead,
    hf.BertLayer: containers.FusedBertLayer,
    hf.BertOnlyMLMHead: containers.FusedBertOnlyMLMHead,
    hf.BertOutput: containers.FusedBertOutput,
    hf.BertPooler: containers.FusedBertPooler,
    hf.BertPreTrainingHeads: containers.FusedBertPreTrainingHeads,
    hf.BertPredictionHeadTransform: containers.FusedBertPredictionHeadTransform,
    hf.BertSelfAttention: containers.FusedBertSelfAttention,
    hf.BertSelfOutput: containers.FusedBertSelfOutput,
}
if hasattr(hf, "BertSdpaSelfAttention"):  # transformers 4
    PARTS[hf.BertSdpaSelfAttention] = containers.FusedBertSdpaSelfAttention
if hasattr(hf, "BertCrossAttention"):  # transformers 5
    PARTS[hf.BertCrossAttention] = containers.FusedBertCrossAttention


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


def _derived(cls: type, bases: tuple[type, ...], doc: str | None) -> type:
    """A class with these bases that goes by the name of `cls`."""
    metaclass: Any = type(cls)
    derived: type = metaclass(cls.__name__, bases, {"__doc__": doc})
    derived.__qualname__ = cls.__qualname__
    derived.__module__ = cls.__module__
    return derived


_fused: dict[type, type] = {  # class -> its fused class
    original: _derived(original, (replacement, computing), computing.__doc__)
    for table, replacement in ((MODELS, _ReplacementModel), (PARTS, _Replacement))
    for original, computing in table.items()
}
_originals: dict[type, type] = {fused: original for original, fused in _fused.items()}
_lock = threading.Lock()


def around() -> dict[type, type]:
    """Models of sentence-transformers and what computes in their place; none unless version 6 or later is loaded."""
    library = sys.modules.get("sentence_transformers")
    if library is None or int(getattr(library, "__version__", "0").split(".")[0]) < 6:
        return {}
    from bert_fast.huggingface import sentence_models as models

    return {
        library.SentenceTransformer: models.FusedSentenceTransformer,
        library.CrossEncoder: models.FusedCrossEncoder,
    }


def fused_class(cls: type) -> type | None:
    """The fused class of `cls`: itself where it is one, None where nothing in its ancestry has one."""
    if issubclass(cls, Fused):
        return cls
    with _lock:
        for original, computing in around().items():
            if original not in _fused:
                _fused[original] = _derived(original, (_ReplacementModel, computing), computing.__doc__)
                _originals[_fused[original]] = original
        if cls not in _fused:
            base = next((ancestor for ancestor in cls.__mro__ if ancestor in _fused), None)
            if base is None:
                return None
            fused = _derived(cls, (cls, _fused[base]), cls.__doc__)
            _fused[cls] = fused
            _originals[fused] = cls
        return _fused[cls]


def original_class(cls: type) -> type | None:
    """What a fused class replaces; None where `cls` is none (classes that FSDP2 derives from one are none)."""
    return _originals.get(cls)


def swap_in(model: nn.Module) -> bool:
    """Fuses every BertModel inside, and the models around it; whether there is one (fused before or now)."""
    modules = list(model.modules())
    if not any(isinstance(module, hf.BertModel) for module in modules):
        return False
    models = (hf.BertPreTrainedModel, *around())
    for module in modules:
        # A module of a class that somebody derived from transformers' stays, and is a reason, see `reasons`.
        if type(module) in _fused or isinstance(module, models):
            _change_class(module, fused_class(type(module)))
    for module in modules:
        if isinstance(module, hf.BertEncoder):
            set_sites(module)
    return True


def swap_out(model: nn.Module) -> None:
    """Gives every fused module inside the class that it had, and its parameters ordinary memory."""
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    for module in fused:
        if original_class(type(module)) is None:
            raise ValueError(f"model: expected classes that fuse made, got {type(module).__name__} derived from one")
    for attention in _attentions(model):
        attention._separate_memory()
    for encoder in encoders(model):
        vars(encoder).pop("graphs", None)
    for module in fused:
        clear_sites(module)
        _change_class(module, original_class(type(module)))


def encoders(model: nn.Module) -> list[Any]:
    """The fused stacks of layers inside."""
    return [one for one in model.modules() if isinstance(one, FusedContainer) and isinstance(one, PackedEncoder)]


def join_projections(model: nn.Module) -> None:
    """Puts query, key and value of every fused attention side by side in memory."""
    for attention in _attentions(model):
        attention._join_memory()


def _attentions(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    return [one for one in modules if isinstance(one, FusedContainer) and isinstance(one, JoinedProjections)]


def _change_class(module: nn.Module, cls: type | None) -> None:
    if cls is not None:
        module.__class__ = cls


def _new(original: type, *arguments: Any) -> Any:
    """An empty object of the fused class, for pickle and copy to fill."""
    cls = fused_class(original)
    assert cls is not None
    return cls.__new__(cls, *arguments)
