"""transformers' models without a head, packed where nothing speaks against it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_outputs

from bert_fast.checks import is_host_beside
from bert_fast.huggingface.family import IS_VERSION_4, Family
from bert_fast.huggingface.flattened import texts_of
from bert_fast.huggingface.fused import Fused, runs
from bert_fast.huggingface.padding import CallLocal, Padding, first_kept, padding_of_call
from bert_fast.huggingface.reasons import has_hooked_linears, reasons, runs_again, setting
from bert_fast.models.packed import Encoded, PackedBertModel
from bert_fast.modules.call import RowChoice, first_rows, first_tokens
from bert_fast.ops.packing import Packing, sent

_ENCODE = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds",
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
    if not model.reads_positions:
        arguments.pop("position_ids", None)
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

    reads_positions = True  # whether position_ids have a meaning; where not, transformers takes any and drops them

    @classmethod
    def forward_for(cls, original: Any, family: Family) -> Callable[..., Any]:
        """As transformers' own."""
        theirs = original.forward
        names = positional(theirs)

        @functools.wraps(theirs)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_replaced():
                return original.forward(self, *args, **kwargs)
            inputs = by_name(names, args, kwargs)
            asked = None if inputs is None else _asked_of(self)
            if asked is not None and inputs is not None and not asked.is_whole:
                inputs["rows"] = asked.rows
            if inputs is None or (found := reasons(self, inputs) or _reasons_of_head(asked, inputs)):
                found = ["the arguments do not fit the signature"] if inputs is None else found
                return self._theirs(functools.partial(theirs, self), args, kwargs, inputs, found)
            if IS_VERSION_4 and inputs.get("input_ids") is not None:
                self.warn_if_padding_and_no_attention_mask(inputs["input_ids"], inputs.get("attention_mask"))
            encoded = self.encode(**encode_arguments(self, inputs))
            if asked is not None and asked.is_whole and asked.rows is first_column:
                asked.moved = functools.partial(_of_packing, encoded.packing)
            return self._output(encoded, inputs)

        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's; a head that reads column 0 finds the first kept token there, behind all hooks."""
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        asked = _asked_of(self)
        return output if asked is None or asked.moved is None else _with_last(output, asked.moved)

    def _theirs(
        self, forward: Any, args: Any, kwargs: dict[str, Any], inputs: dict[str, Any] | None, found: list[str]
    ) -> Any:
        """A call by transformers' code; raises ValueError where packed input meets what speaks against packing."""
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError(f"cu_seqlens: expected a call without {found} (packed input has no other path)")
        kwargs.pop("rows", None)
        if inputs is not None and (moved := beside_tokens(inputs)) is not inputs:
            return self.forward(**{name: each for name, each in moved.items() if name != "rows"})  # type: ignore[attr-defined]
        asked, padding = _asked_of(self), None
        if inputs is not None and (asked is None or asked.reads is None):
            padding = self._padding(inputs)
        if padding is not None and asked is not None and asked.rows is first_column:
            asked.moved = functools.partial(_of_columns, padding.kept)
        with padding_of_call.set(padding):
            output = forward(*args, **kwargs)
        return output if padding is None else padding.amended(output)

    def _padding(self, inputs: Mapping[str, Any]) -> Padding | None:
        """Of a call, None where no mask says what is padding."""
        kept, tokens = kept_tokens(inputs), inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if kept is None or not isinstance(tokens, Tensor):
            return None
        if inputs.get("past_key_values") is not None:  # beside a cache, a mask is of all columns
            kept = kept[:, -tokens.shape[1] :]
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not is_tracing and (tokens.dim() < 2 or kept.shape[1] != tokens.shape[1]):
            return None  # transformers says what is wrong with that, or takes it
        is_shown = bool(setting(inputs, self.config, "output_hidden_states"))
        return Padding(kept, between=is_shown and not runs_again(self))

    def reasons_of_model(self) -> Iterable[str]:
        """Why a model needs transformers' code for what it is itself, beside what `reasons` finds in any."""
        return ()

    def shows_padded(self) -> bool:
        """As transformers shows them."""
        return has_hooked_linears(self)

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


class Asked:
    """What a head wants of the fused model inside, in one call.

    rows: the tokens that it reads. is_whole: others see what the model returns, so all of it is computed.
    reads: of a mask bool [B, S], the columns whose hidden states the head reads, padding or not; None: no padding.
    moved: set by the call, for a head that reads column 0: puts the first kept tokens there.
    """

    def __init__(
        self, model: Any, rows: RowChoice | None, is_whole: bool, reads: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.model, self.rows, self.is_whole, self.reads = model, rows, is_whole, reads
        self.moved: Callable[[Tensor], Tensor] | None = None


asked_in_call: CallLocal[Asked] = CallLocal("asked_in_call")


def _asked_of(model: Any) -> Asked | None:
    asked = asked_in_call.get()
    return asked if asked is not None and asked.model is model else None


def _reasons_of_head(asked: Asked | None, inputs: Mapping[str, Any]) -> list[str]:
    """Why the head around a model needs transformers' code."""
    return [] if asked is None or asked.reads is None else reads_padding(asked.reads, inputs)


def reads_padding(reads: Callable[[Tensor], Tensor], inputs: Mapping[str, Any]) -> list[str]:
    """The reason where a head reads hidden states of padding, which are 0 on the packed path; one device sync."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor):
        return []
    is_known = not (mask.is_meta or torch.compiler.is_compiling())
    return [] if is_known and reads(mask != 0).all() else ["attention_mask: the head reads hidden states of padding"]


def _of_columns(kept: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat((first_kept(hidden, kept.to(hidden.device)).unsqueeze(1), hidden[:, 1:]), 1)


def _of_packing(packing: Packing, hidden: Tensor) -> Tensor:
    if packing.padded_shape is None:
        return first_tokens(packing, hidden, None).unsqueeze(1)
    return torch.cat((first_tokens(packing, packing.pack(hidden), None).unsqueeze(1), hidden[:, 1:]), 1)


def _with_last(output: Any, moved: Callable[[Tensor], Tensor]) -> Any:
    """What a model returned, with the last hidden state moved; hooks may have kept the object, or returned another."""
    if isinstance(output, tuple) and output:
        return (moved(output[0]), *output[1:])
    if isinstance(output, dict) and "last_hidden_state" in output:
        return type(output)(**{**output, "last_hidden_state": moved(output["last_hidden_state"])})
    return output


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
    """Whether a head may ask a module for what only FusedModel has: it is one, and its forward was not replaced."""
    return runs(module, FusedModel)


def chosen(states: tuple[Tensor, ...] | None, choice: Any) -> Any:
    """The states, or in version 5, where output_hidden_states holds their numbers, None in place of all others."""
    if states is None or isinstance(choice, bool) or IS_VERSION_4:
        return states
    count = len(states)
    numbers = [choice] if isinstance(choice, int) else choice
    wanted = {number % count for number in numbers if -count <= number < count}
    return tuple(state if number in wanted else None for number, state in enumerate(states))
