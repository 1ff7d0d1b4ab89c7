"""The walk over a model's modules that `fuse`, `unfuse` and `patch_transformers` share."""

from typing import Any

from torch import nn
from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface.classes import Fused, fused_class, is_replaced, original_class
from bert_fast.huggingface.containers import FusedContainer, clear_sites, set_sites
from bert_fast.modules.projections import JoinedProjections

__all__ = ["FusedModel", "join_projections", "swap_in", "swap_out"]


class FusedModel(Fused):
    """A fused BertModel, or a model around one: what its class makes is fused too (`type(model).from_pretrained`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        swap_in(self)  # type: ignore[arg-type]


def swap_in(model: nn.Module) -> bool:
    """Fuses every BertModel inside, and the models around it; whether there is one (fused before or now)."""
    modules = list(model.modules())
    if not any(isinstance(module, hf.BertModel) for module in modules):
        return False
    for module in modules:
        # A module of a class that somebody derived from transformers' stays, and is a reason, see `reasons`.
        if is_replaced(type(module)) or isinstance(module, hf.BertPreTrainedModel):
            _change_class(module, fused_class(type(module)))
    for module in modules:
        if isinstance(module, hf.BertEncoder):
            set_sites(module)
    return True


def join_projections(model: nn.Module) -> None:
    """Puts query, key and value of every fused attention side by side in memory."""
    for attention in _attentions(model):
        attention._join_memory()


def swap_out(model: nn.Module) -> None:
    """Gives every fused module inside the class that it had, and its parameters ordinary memory."""
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    for module in fused:
        if original_class(type(module)) is None:
            raise ValueError(f"model: expected classes that fuse made, got {type(module).__name__} derived from one")
    for attention in _attentions(model):
        attention._separate_memory()
    for module in fused:
        clear_sites(module)
        _change_class(module, original_class(type(module)))


def _attentions(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    return [one for one in modules if isinstance(one, FusedContainer) and isinstance(one, JoinedProjections)]


def _change_class(module: nn.Module, cls: type | None) -> None:
    if cls is not None:
        module.__class__ = cls
