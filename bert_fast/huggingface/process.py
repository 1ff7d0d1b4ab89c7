"""What was done to the whole process that takes calls of every fused model to transformers' code.

A class of transformers whose `forward` was replaced, an attention that was registered under a name of transformers', a
function of torch that was replaced, hooks of every module: none of these shows in the model.
"""

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from bert_fast.huggingface.family import IS_VERSION_4, Family
from bert_fast.modules.originals import GLOBAL_HOOKS, Originals, at_trace_time, is_of, replaced_in_torch

# Of a library's functions and methods, those that a packed call computes in place of, beside every `forward`.
_FUNCTIONS = (
    "eager_attention_forward", "create_bidirectional_mask", "create_causal_mask", "apply_chunking_to_forward",
    "create_position_ids_from_input_ids", "apply_rotary_pos_emb", "rotate_half",
)  # fmt: skip
_OTHERS = ("__", "get_", "set_", "resize_", "prune_")  # how methods begin that no call runs
_libraries: dict[str, Originals] = {}
_registered: dict[Any, Any] = {}  # name of an attention -> what transformers has for it, once seen


def process_reasons(model: Any, attention: str | None) -> Sequence[str]:
    """Why calls of a fused model with this attention leave the packed path, whatever the call is given."""
    return _reasons_of(model.fused_original.__module__, model.fused_family, attention)


@at_trace_time
def _reasons_of(library: str, family: Family, attention: str | None) -> Sequence[str]:
    originals = _libraries.get(library)
    if originals is None:
        originals = _libraries[library] = _originals(library, family)
    replaced, of_torch, is_heard = originals.replaced(), replaced_in_torch(), any(GLOBAL_HOOKS)
    is_registered = IS_VERSION_4 or _is_as_registered(attention)
    if not (replaced or of_torch or is_heard) and is_registered:
        return ()
    name = library.rpartition(".")[2]
    found = [f"{name}.{path}: replaced for the whole process" for path in replaced]
    found += [f"torch.nn.{path}: replaced for the whole process" for path in of_torch]
    if is_heard:
        found.append("hooks of every module are registered (torch.nn.modules.module)")
    if not is_registered:
        found.append(f"attention {attention!r}: another function is registered under this name")
    return found


def _originals(library: str, family: Family) -> Originals:
    """Those of a library's functions that a packed call computes in place of."""
    theirs, prefix = importlib.import_module(library), family.libraries[library]
    # The package kernels makes modules of some, which say themselves what they run.
    paths = [name for name in _FUNCTIONS if inspect.isfunction(getattr(theirs, name, None))]
    for pattern in ("*Model", *family.parts):
        cls = getattr(theirs, name := pattern.replace("*", prefix), None)
        if cls is not None:
            methods = [each for each in vars(cls) if not each.startswith(_OTHERS)]
            methods = [each for each in methods if each != "forward" and inspect.isfunction(getattr(cls, each))]
            paths += [f"{name}.{each}" for each in ("forward", *methods)]
    return Originals(theirs, paths)


def _is_as_registered(attention: Any) -> bool:
    """Whether the attention and its mask of this name are transformers' own, or ours; version 4 asks no registry."""
    here, everywhere, masks_here, masks_everywhere = _registries()
    found = (
        here.get(attention), everywhere.get(attention), masks_here.get(attention), masks_everywhere.get(attention)
    )  # fmt: skip
    if found == _registered.get(attention):
        return True
    if all(one is None or is_of(one, "transformers") or is_of(one, "bert_fast") for one in found):
        return bool(_registered.setdefault(attention, found) == found)
    return False


@functools.cache
def _registries() -> tuple[dict[str, Any], ...]:
    """Where transformers looks up attentions and their masks by name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions

    return tuple(each for one in (attentions, masks) for each in (one._local_mapping, one._global_mapping))
