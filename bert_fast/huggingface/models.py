"""transformers' models without a head, packed where nothing speaks against it."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_outputs

from bert_fast.checks import is_host_beside
from bert_fast.huggingface.family import IS_VERSION_4, Family
from bert_fast.huggingface.flattened import texts_of
from bert_fast.huggingface.fused import Fused, runs
from bert_fast.huggingface.reasons import TRACED, reasons, setting
from bert_fast.models.packed import Encoded, PackedBertModel
from bert_fast.modules.call import RowChoice, first_rows, first_tokens
from bert_fast.ops.packing import Packing, sent

__all__ = [
    "FusedModel",
    "asking",
    "beside_tokens",
    "by_name",
    "chosen",
    "encode_arguments",
    "first_column",
    "is_fused_model",
    "kept_tokens",
    "positional",
]

_ENCODE = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "head_mask", "inputs_embeds",
    "encoder_hidden_states", "encoder_attention_mask", "output_hidden_states", "cu_seqlens", "max_seqlen",
    "dropout_seed", "rows",
)  # fmt: skip


def positional(function: Any) -> tuple[str, ...]:
    """Names of a method's arguments that may be given by position, in their order."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's arguments by name; None where there are too many, or one is given twice."""
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    return inputs if len(inputs) == len(args) + len(kwargs) else None


def encode_arguments(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's arguments that `encode` of a fused model without a head takes."""
    arguments = {"use_cache": False, **{name: inputs[name] for name in _ENCODE if name in inputs}}
    if (texts := texts_of(model, inputs)) is not None:
        arguments["texts"] = texts
    if arguments.get("output_hidden_states") is not None:  # version 5 also takes their numbers, see `chosen`
        arguments["output_hidden_states"] = bool(setting(arguments, None, "output_hidden_states"))
    return arguments


class FusedModel(Fused, PackedBertModel):
    """A model of transformers without a head, whose calls are packed where nothing speaks against it.

    forward takes three arguments beyond transformers' own, `cu_seqlens`, `max_seqlen` and `dropout_seed`, as
    `bert_fast.BertModel.forward` explains them; heads of transformers 5 pass them on.
    """

    @classmethod
    def forward_for(cls, original: Any, family: Family) -> Callable[..., Any]:
        """As transformers' own."""
        theirs, is_asked = original.forward, not family.passes_arguments
        names = positional(theirs)

        @functools.wraps(theirs)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = by_name(names, args, kwargs)
            if is_asked and inputs is not None and (rows := _asked_rows(self)) is not None:
                inputs["rows"] = rows
            if inputs is None or (found := reasons(self, inputs)):
                found = ["the arguments do not fit the signature"] if inputs is None else found
                return self._theirs(functools.partial(original.forward, self), args, kwargs, inputs, found)
            if IS_VERSION_4 and inputs.get("input_ids") is not None:
                self.warn_if_padding_and_no_attention_mask(inputs["input_ids"], inputs.get("attention_mask"))
            encoded = self.encode(**encode_arguments(self, inputs))
            return self._output(encoded, inputs)

        return forward

    def _theirs(
        self, forward: Any, args: Any, kwargs: dict[str, Any], inputs: dict[str, Any] | None, found: list[str]
    ) -> Any:
        """A call by transformers' code; raises ValueError where packed input meets what speaks against packing."""
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError(f"cu_seqlens: expected a call without {found} (packed input has no other path)")
        kwargs.pop("rows", None)
        if inputs is not None and (moved := beside_tokens(inputs)) is not inputs:
            return self.forward(**moved)  # type: ignore[attr-defined]
        if inputs is not None and found == [TRACED] and (kept := kept_tokens(inputs)) is not None:
            return self._traced(forward, {k: v for k, v in inputs.items() if k != "rows"}, kept)
        return forward(*args, **kwargs)

    def _traced(self, forward: Any, inputs: dict[str, Any], kept: Tensor) -> Any:
        """transformers' own computation, and what the packed one makes of padding, without ops of ours."""
        output, padding = forward(**{**inputs, "return_dict": True}), ~kept.unsqueeze(-1)
        hidden = output.last_hidden_state = output.last_hidden_state.masked_fill(padding, 0.0)
        states = output.hidden_states
        if states is not None:
            output.hidden_states = tuple(None if each is None else each.masked_fill(padding, 0.0) for each in states)
        if self.pooler is not None:
            first = kept.int().argmax(1).view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
            output.pooler_output = self.pooler(hidden.gather(1, first))
        return output if setting(inputs, self.config, "return_dict") else output.to_tuple()

    def _output(self, encoded: Encoded, inputs: Mapping[str, Any]) -> Any:
        states, pooled = encoded.hidden_states, None if self.pooler is None else self.pool(encoded)
        if encoded.rows is not None:
            hidden = encoded.hidden
            if inputs.get("rows") is first_column:
                hidden = first_tokens(encoded.packing, hidden, encoded.rows).unsqueeze(1)
        else:
            hidden = encoded.packing.unpack(encoded.hidden) if states is None else states[-1]
        states = chosen(states, setting(inputs, self.config, "output_hidden_states"))
        if setting(inputs, self.config, "return_dict"):
            fields = {"last_hidden_state": hidden, "hidden_states": states}
            if pooled is not None:
                fields["pooler_output"] = pooled
            return getattr(modeling_outputs, self.fused_family.output)(**fields)
        return (
            hidden,
            *(() if pooled is None and not self.fused_family.pads_tuples else (pooled,)),
            *(() if states is None else (states,)),
        )


_asked: ContextVar[tuple[Any, RowChoice] | None] = ContextVar("_asked", default=None)


@contextmanager
def asking(model: Any, rows: RowChoice) -> Iterator[None]:
    """Calls of a fused model in this block, and in this thread, are as if `rows` had been passed."""
    token = _asked.set((model, rows))
    try:
        yield
    finally:
        _asked.reset(token)


def _asked_rows(model: Any) -> RowChoice | None:
    asked = _asked.get()
    return asked[1] if asked is not None and asked[0] is model else None


def first_column(packing: Packing) -> Tensor:
    """As `first_rows`, for who reads column 0 of the hidden states: [B, 1, H] is returned, of kept tokens."""
    return first_rows(packing)


def kept_tokens(inputs: Mapping[str, Any]) -> Tensor | None:
    """Which tokens of a call are no padding, bool [B, S]; None where no mask says so."""
    mask, tokens = inputs.get("attention_mask"), _tokens(inputs)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    kept = mask != 0
    return kept.expand(-1, tokens.shape[1]) if mask.shape[1] == 1 and tokens is not None else kept


def beside_tokens(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's arguments for transformers' own code: itself where no mask is of the host, or has one row for all."""
    tokens, changed = _tokens(inputs), {}
    if tokens is None:
        return inputs
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = given = inputs.get(name)
        if not isinstance(mask, Tensor):
            continue
        if mask.dim() == 2 and mask.shape[0] == 1 != tokens.shape[0] and not is_traced:
            mask = mask.expand(tokens.shape[0], -1)
        if mask.device != tokens.device and is_host_beside(mask, tokens.device):
            mask = sent(mask, tokens.device)
        if mask is not given:
            changed[name] = mask
    return {**inputs, **changed} if changed else inputs


def _tokens(inputs: Mapping[str, Any]) -> Tensor | None:
    tokens = inputs.get("inputs_embeds" if inputs.get("input_ids") is None else "input_ids")
    return tokens if isinstance(tokens, Tensor) else None


def is_fused_model(module: Any) -> bool:
    """Whether a head may ask a module for what only FusedModel has: it is one, and its forward is nobody else's."""
    return runs(module, FusedModel)


def chosen(states: tuple[Tensor, ...] | None, choice: Any) -> Any:
    """The states, or in version 5, where output_hidden_states holds their numbers, None in place of all others."""
    if states is None or isinstance(choice, bool) or IS_VERSION_4:
        return states
    count = len(states)
    numbers = [choice] if isinstance(choice, int) else choice
    wanted = {number % count for number in numbers if -count <= number < count}
    return tuple(state if number in wanted else None for number, state in enumerate(states))
