"""Batches that were flattened: texts one after another in one row, as flash attention takes them.

`transformers.DataCollatorWithFlattening` and its like make [1, T] ids and position ids that begin anew with every text.

    input_ids    = [[101, 7, 102, 101, 8, 9, 102]]
    position_ids = [[  0, 1,   2,   0, 1, 2,   3]]        cu_seqlens = [0, 3, 7]

transformers' flash attention finds the texts in `cu_seq_lens_q` and its like where all four are given, else in the
positions, where these reach it; eager attention and SDPA see one text. So does a fused model. What it returns has the
row's shape, [1, T, ...].
"""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert_fast.env import SETTINGS

_ATTENTION = ("eager", "sdpa", "flash_attention", "flex_attention", "paged", "bert_fast", "None")  # beginnings
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Texts(NamedTuple):
    """Where the texts of a row lie: cu_seqlens (Tensor [number of texts + 1], int32), max_seqlen (int)."""

    cu_seqlens: Tensor
    max_seqlen: int


def texts_of(model: Any, inputs: Mapping[str, Any]) -> Texts | None:
    """The texts of a flattened batch; None where transformers would see one text a row."""
    if inputs.get("position_ids") is inputs.get("cu_seq_lens_q") is None or not _is_flat(model, inputs):
        return None
    beside = inputs if model.fused_family.passes_positions else {**inputs, "position_ids": None}
    return texts_of_row(beside, _tokens(inputs).shape[1])


def texts_of_row(inputs: Mapping[str, Any], num_tokens: int) -> Texts | None:
    """The texts of a row, by what an attention is given beside it; None where it is one text.

    Positions are read on the CPU, so they wait for a GPU, once a tensor; given offsets do not.
    """
    if _are_given(inputs):
        return Texts(inputs["cu_seq_lens_q"].int(), int(inputs["max_length_q"]))
    positions = inputs.get("position_ids")
    is_looked_at = isinstance(positions, Tensor) and positions.numel() == num_tokens > 1
    return _offsets_of_positions(positions) if is_looked_at else None  # type: ignore[arg-type]


def texts_reason(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Why a flattened batch must be computed by transformers' code; None where nothing speaks against packing it."""
    if inputs.get("position_ids") is inputs.get("cu_seq_lens_q") is None:
        return None
    if _are_given(inputs) and _keeps_texts_apart(model.config):
        tokens = _tokens(inputs)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2 and tokens.shape[0] != 1:
            return "cu_seq_lens_q: a batch of several rows"
        return offsets_problem(inputs)
    if not _is_flat(model, inputs):
        return None
    if not model.fused_family.passes_positions or inputs.get("position_ids") is None:
        return None
    if torch.compiler.is_compiling():
        return "position_ids: a compiled call does not look where texts begin"
    texts = texts_of(model, inputs)
    if texts is not None and int(texts.cu_seqlens[0]):
        return "position_ids: the row does not begin with its smallest position"
    return None


def offsets_problem(inputs: Mapping[str, Any]) -> str | None:
    """What is wrong with the offsets, where all four arguments are given; None where nothing is.

    Values are compared on the CPU, elsewhere with BERT_FAST_DEBUG=1.
    """
    if not _are_given(inputs):
        return None
    first, second = inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"]
    if first is second and isinstance(first, Tensor) and first.dim() == 1:
        return None
    if not (isinstance(first, Tensor) and isinstance(second, Tensor) and first.dim() == second.dim() == 1):
        return "cu_seq_lens_q, cu_seq_lens_k: not Tensors [number of texts + 1]"
    is_compared = (first.is_cpu or SETTINGS.debug) and not torch.compiler.is_compiling()
    if first.shape != second.shape or (is_compared and not torch.equal(first, second)):
        return "cu_seq_lens_q, cu_seq_lens_k: queries and keys have other offsets"
    return None


def is_known_attention(attention: Any) -> bool:
    """Whether an attention, by its name, computes what the packed path does."""
    return str(attention).startswith(_ATTENTION) or _tells_texts_apart(attention)


def _tells_texts_apart(attention: Any) -> bool:
    """Whether an attention, by its name, keeps the texts of a flattened row apart."""
    # Not at the top: attention.py, which comes with bert_fast itself, does not import transformers.
    from bert_fast.huggingface.family import IS_VERSION_4

    name = str(attention)
    if IS_VERSION_4 or name.startswith("flash_attention") or name == "bert_fast":
        return not IS_VERSION_4
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

    return name in FLASH_ATTN_KERNEL_FALLBACK.values()


def _keeps_texts_apart(config: Any) -> bool:
    """Whether the attention of a model keeps texts apart; ours is given a mask of all columns by a decoder."""
    attention = config._attn_implementation
    return _tells_texts_apart(attention) and not (attention == "bert_fast" and getattr(config, "is_decoder", False))


def _is_flat(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a call has one row, and an attention that would look for texts in it."""
    tokens = _tokens(inputs)
    is_row = isinstance(tokens, Tensor) and tokens.dim() >= 2 and tokens.shape[0] == 1 and not tokens.is_meta
    return is_row and inputs.get("cu_seqlens") is None and _keeps_texts_apart(model.config)


def _tokens(inputs: Mapping[str, Any]) -> Any:
    return inputs.get("inputs_embeds" if inputs.get("input_ids") is None else "input_ids")


def _are_given(inputs: Mapping[str, Any]) -> bool:
    return inputs.get(OFFSETS[0]) is not None and all(inputs.get(name) is not None for name in OFFSETS[1:])


_last: tuple[Any, int, Texts | None] = (lambda: None, 0, None)  # a call asks more than once


def _offsets_of_positions(position_ids: Tensor) -> Texts | None:
    """Where texts begin whose positions count from one number on; None where there is one text.

    position_ids (Tensor of T elements, int): read on the CPU, so a GPU is waited for once a tensor.
    Returns: cu_seqlens on the CPU. The first may be greater than 0, where the row does not begin with a text.
    """
    global _last
    if torch.compiler.is_compiling():
        return _find(position_ids)
    tensor, version, found = _last
    is_tracked = not position_ids.is_inference()
    if is_tracked and tensor() is position_ids and version == position_ids._version:
        return found
    found = _find(position_ids)
    if is_tracked:
        _last = (weakref.ref(position_ids), position_ids._version, found)
    return found


def _find(position_ids: Tensor) -> Texts | None:
    positions = position_ids.detach().reshape(-1).to("cpu", torch.int64)
    least = positions.min()
    if torch.equal(positions, torch.arange(len(positions), device="cpu") + least):
        return None
    starts = (positions == least).nonzero().squeeze(1)
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=len(positions))
    return Texts(cu_seqlens.int(), int(cu_seqlens.diff().max()))
