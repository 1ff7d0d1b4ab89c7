"""What speaks against the packed path: one list of reasons, empty where nothing does.

The packed path runs the same parameters on [T, H]. It is left wherever the difference could be seen: a hook or a
replaced module inside would get other shapes, a tracer would record ops that its format does not know, an argument asks
for what only transformers' own code computes.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from bert_fast.huggingface.family import IS_VERSION_4
from bert_fast.huggingface.flattened import OFFSETS, is_known_attention, texts_reason
from bert_fast.huggingface.fused import Fused, FusedUncalled
from bert_fast.huggingface.ignored import is_ignored
from bert_fast.huggingface.process import process_reasons
from bert_fast.modules.fusable import collects, has_hooks
from bert_fast.modules.look import Concluded
from bert_fast.modules.pooler import PackedPooler

# Arguments of a model's forward that the packed path has a use for, or that need none.
ARGUMENTS = frozenset(
    (
        "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "use_cache", "cache_position",
        "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "cu_seqlens", "max_seqlen",
        "dropout_seed", "rows", "encoder_hidden_states", "encoder_attention_mask",
        *(() if IS_VERSION_4 else OFFSETS),
    )
)  # fmt: skip
# The reason of which a program is to show nothing: it gives what the packed path gives, on padding too.
_TRACED = "the call is traced, for a program that shall run without bert_fast"
_PLAIN_LEAVES = (nn.Linear, nn.Embedding, nn.LayerNorm)
_PLAIN_TENSORS = (Tensor, nn.Parameter, type(None))


def reasons(model: Any, inputs: Mapping[str, Any]) -> list[str]:
    """Why a fused model, or one around it, leaves a call to transformers' code.

    inputs: arguments of forward without a head, by name.
    """
    return [*_argument_reasons(model, inputs), *standing_reasons(model, inputs)]


def standing_reasons(model: Any, inputs: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Those that lie in the process, the configuration, where inputs do not overrule it, and the modules."""
    attention = model.config._attn_implementation
    found = [*process_reasons(model, attention), *_setting_reasons(model, inputs), *_of_modules(model)]
    found += getattr(model.base_model, "reasons_of_model", tuple)()
    if not is_known_attention(attention):
        found.append(f"config._attn_implementation: {attention!r} is not one of transformers' own")
    return found


def _argument_reasons(model: Any, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Those that lie in the arguments and the state of PyTorch."""
    config, plain, unknown = model.config, _plain_tensors(), model.fused_family.unknown_arguments
    decodes = getattr(config, "is_decoder", False)  # not every family knows decoders
    for name, value in inputs.items():
        if (name not in ARGUMENTS or name in unknown) and value is not None:
            if not is_ignored(model, name):
                yield f"{name}: the packed path has no such argument"
        elif isinstance(value, Tensor) and type(value) not in plain:
            yield f"{name}: a {type(value).__name__}, not a plain Tensor"
    given = inputs.get("input_ids")
    if given is None:
        given = inputs.get("inputs_embeds")
    if not isinstance(given, Tensor) or (given.is_meta and not torch.compiler.is_compiling()):
        yield "input_ids, inputs_embeds: no Tensor with data"
    elif given.is_floating_point() and given.dtype != model.dtype:
        yield f"inputs_embeds: of {given.dtype}, the model of {model.dtype}"
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = inputs.get(name)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            yield f"{name}: not a Tensor [B, S]"
    if inputs.get("encoder_hidden_states") is not None and (IS_VERSION_4 or not decodes):
        yield "encoder_hidden_states: for an encoder, or in transformers 4"
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        yield _TRACED
        return
    if (reason := texts_reason(model, inputs)) is not None:
        yield reason
    if torch.compiler.is_compiling():
        if getattr(model, "_output_capturing_hooks_installed", False):
            yield "the hooks that transformers' output_attentions left cannot be compiled"
    else:
        if torch._C._are_functorch_transforms_active():
            yield "the call is under a transformation of torch.func"
        elif forward_ad._current_level >= 0:
            yield "derivatives are taken in forward mode"
        if _is_collecting():
            yield "a model around this one collects the layers' outputs"


def _setting_reasons(model: Any, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Those that lie in what the configuration says, where a call says nothing."""
    config = model.config
    decodes = getattr(config, "is_decoder", False)
    if setting(inputs, config, "output_attentions"):
        yield "output_attentions: probabilities are asked for"
    if decodes and setting(inputs, config, "use_cache") and not _is_checkpointing(model):
        yield "use_cache: a cache is asked for"
    if getattr(config, "is_causal", None) not in (None, decodes):
        yield f"config.is_causal: {config.is_causal}"


def _of_modules(model: Any) -> Iterable[str]:
    """Those that lie in the modules inside."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return _module_reasons(model, [])  # which torch.compile traces, so that its guards notice changes
    found, hooked = _concluded(model)[0]
    if hooked and (getattr(model.config, "is_decoder", False) or runs_again(model) or _cuts_tokens(model)):
        return [*found, *[f"{name}: hooks are registered" for name in hooked]]
    return found


def has_hooked_linears(model: Any) -> bool:
    """Whether linear layers in a model without a head have hooks that see the packed path padded.

    As `reasons` has just found, of the model or of one with a head around it.
    """
    return not torch.compiler.is_compiling() and _has_hooked.get(model, False)


def _conclude(model: Any) -> tuple[Any, tuple[()]]:
    hooked: list[str] = []
    found = tuple(_module_reasons(model, hooked))
    _has_hooked[model.base_model] = bool(hooked)
    return (found, tuple(hooked)), ()


_has_hooked: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()
_concluded = Concluded(_conclude)


def _module_reasons(model: Any, hooked: list[str]) -> Iterator[str]:
    """Those that lie in the modules inside, by a walk of 10 to 30 us a layer.

    hooked: gets the names of linear layers whose hooks see the packed path padded.
    """
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    plain, containers = _plain_tensors(), model.fused_family.containers
    sees_padded = not (torch.compiler.is_compiling() or torch.compiler.is_exporting())
    while waiting:
        prefix, parent = waiting.pop()
        is_list, is_of_layer = type(parent) is nn.ModuleList, "layer." in prefix or "layers." in prefix
        for name, child in parent._modules.items():
            if child is None:
                continue
            if "forward" in child.__dict__:
                yield f"{prefix}{name}: its forward is replaced"
            if has_noticing_hooks(child) or (isinstance(child, FusedUncalled) and has_hooks(child)):
                if sees_padded and is_of_layer and type(child) is nn.Linear:
                    hooked.append(f"{prefix}{name}")
                else:
                    yield f"{prefix}{name}: hooks are registered"
            if isinstance(child, Fused) or type(child) is nn.ModuleList:
                waiting.append((f"{prefix}{name}.", child))
            elif name in ("pooler", "embeddings") and (copies := _retrained(child)) is not None:
                waiting += [(f"{prefix}{name}.", child), (f"{prefix}{name}.modules_to_save.", copies)]
            elif is_list or name in containers:
                yield f"{prefix}{name}: a {type(child).__name__} which is not fused"
            elif isinstance(child, _PLAIN_LEAVES):
                weight = child._parameters.get("weight")
                if type(weight) not in plain and not _is_fully_sharded(weight, model):
                    yield f"{prefix}{name}: its parameters are of {type(weight).__name__}"
            elif name.endswith("dropout"):
                if type(child) is not nn.Dropout:
                    yield f"{prefix}{name}: a {type(child).__name__}, not nn.Dropout"
                elif child.p > 0.0 and (child.training != parent.training or (child.training and not model.training)):
                    yield f"{prefix}{name}: drops in evaluation" if child.training else f"{prefix}{name}: in evaluation"
            elif name == "activation" and isinstance(parent, PackedPooler) and type(child) is not nn.Tanh:
                yield f"{prefix}{name}: a {type(child).__name__}, not nn.Tanh"


def _retrained(module: nn.Module) -> nn.Module | None:
    """The copies of a module that PEFT retrains (`modules_to_save`), to one of which calls go; None: not all fused."""
    kind = type(module)
    if kind.__name__ != "ModulesToSaveWrapper" or not kind.__module__.startswith("peft."):
        return None
    copies: Any = module.modules_to_save
    return copies if all(isinstance(copy, Fused) for copy in (module.original_module, *copies.values())) else None


def setting(inputs: Mapping[str, Any], config: Any, name: str) -> Any:
    """What a call says of `name`, and if it says nothing, the configuration: anything true or false, as there.

    Raises: TypeError where the call's value, a tensor of several elements say, is neither.
    """
    given = inputs.get(name)
    if given is None:
        return getattr(config, name, None)
    try:
        bool(given)
    except Exception:
        raise TypeError(f"{name}: expected a bool, got {type(given).__name__}") from None
    return given


def _plain_tensors() -> tuple[type, ...]:
    """Types of what the packed path takes; where a program is exported, those that stand for them."""
    if not torch.compiler.is_exporting():
        return _PLAIN_TENSORS
    from torch._subclasses.fake_tensor import FakeTensor

    return *_PLAIN_TENSORS, FakeTensor


def runs_again(model: Any) -> bool:
    """Whether layers run again in backward: they must find all as it was, and no call is there then."""
    base = model.base_model
    parts = (base, base.encoder, *getattr(base.encoder, "layer", ()))
    return any(each.training and getattr(each, "gradient_checkpointing", False) for each in parts)


def _cuts_tokens(model: Any) -> bool:
    """Whether layers work on some tokens at a time."""
    return any(getattr(layer, "chunk_size_feed_forward", 0) for layer in getattr(model.base_model.encoder, "layer", ()))


def _is_checkpointing(model: nn.Module) -> bool:
    return model.training and getattr(model, "gradient_checkpointing", False)


def has_noticing_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered that would notice other shapes, or be missed where a module is not called."""
    if not has_hooks(module):
        return False
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not all(_is_harmless(hook) for hooks in kinds for hook in hooks.values())


def _is_harmless(hook: Any) -> bool:
    """FSDP2's; transformers' that collect where the call asks for it, or make inputs require gradients."""
    where = getattr(hook, "__module__", None) or ""
    return (
        where.startswith("torch.distributed.")
        or collects(hook)
        or getattr(hook, "__name__", "") == "make_inputs_require_grads"
    )


def _is_collecting() -> bool:
    """Whether transformers 5 collects hidden states for a model further out."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return capturing is not None and capturing._active_collector.get() is not None


def _is_fully_sharded(parameter: Any, model: nn.Module) -> bool:
    """Whether a DTensor is FSDP2's, which puts plain tensors in place before a layer is called."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor) or sum(isinstance(p, Shard) for p in parameter.placements) > 1:
        return False  # a second sharded dimension is that of tensor parallelism
    return any(isinstance(module, FSDPModule) for module in model.modules())
