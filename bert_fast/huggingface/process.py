"""What was done to the whole process that takes calls of every fused model to transformers' code.

A class of transformers whose `forward` was replaced, an attention that was registered under a name of transformers', a
function of torch that was replaced, hooks of every module: none of these shows in the model.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from bert_fast.huggingface.family import IS_VERSION_4, Family
from bert_fast.modules.originals import Originals, at_trace_time, has_global_hooks, is_of, replaced_in_torch

__all__ = ["process_reasons"]

_FUNCTIONS = ("eager_attention_forward", "create_bidirectional_mask", "create_causal_mask")
_libraries: dict[str, Originals] = {}
_registered: dict[str, Any] = {}  # name -> what transformers has for it, once seen


def process_reasons(model: Any) -> tuple[str, ...]:
    """Why calls of a fused model leave the packed path, whatever the model and the call."""
    return _reasons_of(model.fused_original.__module__, model.fused_family, model.config._attn_implementation)


@at_trace_time
def _reasons_of(library: str, family: Family, attention: str | None) -> tuple[str, ...]:
    originals = _libraries.get(library)
    if originals is None:
        originals = _libraries[library] = _originals(library, family)
    replaced = originals.replaced()
    of_torch = replaced_in_torch()
    if replaced or of_torch or has_global_hooks() or not _is_as_registered(attention):
        return tuple(_described(library, replaced, of_torch, attention))
    return ()


def _described(library: str, replaced: Any, of_torch: Any, attention: str | None) -> Iterator[str]:
    name = library.rpartition(".")[2]
    yield from (f"{name}.{path}: replaced for the whole process" for path in replaced)
    yield from (f"torch.nn.{path}: replaced for the whole process" for path in of_torch)
    if has_global_hooks():
        yield "hooks of every module are registered (torch.nn.modules.module)"
    if not _is_as_registered(attention):
        yield f"attention {attention!r}: another function is registered under this name"


def _originals(library: str, family: Family) -> Originals:
    """Those of a library's functions that a packed call computes in place of."""
    theirs, prefix = importlib.import_module(library), family.libraries[library]
    classes = [pattern.replace("*", prefix) for pattern in ("*Model", *family.parts)]
    paths = [f"{name}.forward" for name in classes if hasattr(theirs, name)]
    return Originals(theirs, [*paths, *(name for name in _FUNCTIONS if hasattr(theirs, name))])


def _is_as_registered(attention: str | None) -> bool:
    """Whether the attention and its mask of this name are transformers' own, or ours."""
    if IS_VERSION_4:  # whose models do not ask the registry
        return True
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions

    name = str(attention)
    found = (_entry(attentions, name), _entry(masks, name))
    if found == _registered.get(name):
        return True
    if all(one is None or is_of(one, "transformers") or is_of(one, "bert_fast") for one in found):
        return _registered.setdefault(name, found) == found
    return False


def _entry(registry: Any, name: str) -> Any:
    local = registry._local_mapping.get(name)
    return registry._global_mapping.get(name) if local is None else local
