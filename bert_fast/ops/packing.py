"""Removing padding once and putting it back once.

A batch of B sequences is worked on as `[T, ...]`, T = kept tokens, sequence after sequence. `Packing` remembers where
each token came from:

    keep_mask = [[1, 1, 0],          cu_seqlens = [0, 2, 3]      (int32 [B + 1])
                 [0, 1, 0]]          coords     = [[0, 0], [0, 1], [1, 1]]   (original row and position, int32 [T, 2])
                                     indices    = [0, 1, 4]      (into the flattened [B * S] batch)

`coords` name tokens in dropout masks, so padded and packed runs of one batch draw the same mask.
"""

import functools
import itertools
import math
import numbers
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _get_tracing_state, _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch

from bert_fast.checks import (
    check_dtype,
    check_host_or_same,
    check_integer,
    check_same_device,
    check_shape,
    check_tensor,
    is_host_beside,
)
from bert_fast.env import SETTINGS

_MOST_TOKENS = 2**31  # offsets are of 32 bits
_ALIGNMENT = 16  # bytes; kernels are compiled for tensors that begin at multiples of it
_PROXY = _TorchDispatchModeKey.PROXY  # the dispatch mode of `make_fx`
_MOST_ON_HOST = 256  # sequences; for more of them, operators are faster than Python's loops


@dataclass(frozen=True)
class Packing:
    """Layout of a packed batch; make one with `from_keep_mask`, `full` or `from_cu_seqlens`.

    Args:
        cu_seqlens (Tensor [B + 1], int32): start of every sequence, then T.
        max_seqlen (int): tokens in the longest sequence (kept ones).
        coords (Tensor [T, 2], int32): original (row, position) of every kept token.
        indices (Tensor [T], int64, or None): of the kept tokens in the flattened padded batch; None when all are kept.
        padded_shape ((B, S) or None): of the padded batch; None when the input came packed.
        order (Tensor [B], int32, or None): the sequences, longest first, for kernels that deal out one at a time; only
            on a GPU, and None where no sequence is known to be longer than another.
        min_seqlen (int): tokens in the shortest sequence; 0 where the host does not know.

    Example:
        >>> packing = ops.Packing.from_keep_mask(torch.tensor([[1, 1, 0], [1, 0, 0]]))
        >>> packing.coords.tolist()
        [[0, 0], [0, 1], [1, 0]]
        >>> packing.pack(torch.tensor([[5, 6, 0], [7, 0, 0]])).tolist()
        [5, 6, 7]
    """

    cu_seqlens: Tensor
    max_seqlen: int
    coords: Tensor
    indices: Tensor | None
    padded_shape: tuple[int, int] | None
    order: Tensor | None = None
    min_seqlen: int = 0

    @classmethod
    def from_keep_mask(cls, keep_mask: Tensor, device: torch.device | str | None = None) -> "Packing":
        """Packing of a padded batch; costs one device sync, and none where the mask is on the CPU.

        keep_mask (Tensor [B, S], bool or number): nonzero marks a token to keep; padding may stand anywhere.
        device: where the tokens are; default: where keep_mask is, or, of one on the CPU, anywhere: it is counted there,
            and copied without waiting.
        """
        check_shape("keep_mask", keep_mask, ("B", "S"))
        if keep_mask.is_meta:
            raise ValueError("keep_mask: expected a Tensor with values, since they are counted, got one on meta")
        if keep_mask.device != device:
            device = _device_for("keep_mask", keep_mask, device)
        batch_size, length = keep_mask.shape
        kept = keep_mask != 0
        counts = kept.sum(1)
        if torch.compiler.is_compiling():
            # A graph must not depend on the number of kept tokens: no shortcut, and the longest length is bounded.
            kept, counts = (t if t.device == device else sent(t, device) for t in (kept, counts))
            places, max_seqlen, min_seqlen = kept.nonzero(), length, 0
            cu_seqlens, order = _offsets(counts)
        else:
            # A trace is replayed with other masks, so its offsets must be computed by operators.
            on_host = 0 < batch_size <= _MOST_ON_HOST and not _is_traced()
            lengths = counts.tolist() if on_host else []  # the only device sync; else in `_extent`
            extent = (sum(lengths), max(lengths), min(lengths)) if on_host else _extent(counts)
            num_tokens, max_seqlen, min_seqlen = extent
            if num_tokens == batch_size * length:
                return cls.full(batch_size, length, device)
            if kept.device != device:
                kept = sent(kept, device)
                counts = counts if on_host else kept.sum(1)
            places = _nonzero(kept, num_tokens)
            cu_seqlens, order = _offsets_on_host(lengths, kept.device) if on_host else _offsets(counts)
        rows, positions = places.unbind(1)
        indices = torch.add(positions, rows, alpha=length)
        # PyTorch returns places column by column.
        coords = places.to(torch.int32, memory_format=torch.contiguous_format)
        return cls(cu_seqlens, max_seqlen, coords, indices, (batch_size, length), order, min_seqlen)

    @classmethod
    def full(cls, batch_size: int, length: int, device: torch.device | str) -> "Packing":
        """Packing of a batch without padding: [B, S, ...] is only reshaped."""
        batch_size, length = as_length("batch_size", batch_size), as_length("length", length)
        if not torch.compiler.is_compiling() and batch_size * length >= _MOST_TOKENS:
            raise ValueError(
                f"batch_size, length: expected fewer than 2**31 tokens, got {batch_size} sequences of {length}"
            )
        if not isinstance(device, torch.device):
            device = _as_device(device)
        cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length
        rows = torch.arange(batch_size, dtype=torch.int32, device=device).unsqueeze(1).expand(batch_size, length)
        positions = torch.arange(length, dtype=torch.int32, device=device).expand(batch_size, length)
        coords = torch.stack((rows, positions), dim=2).view(batch_size * length, 2)
        return cls(cu_seqlens, length, coords, None, (batch_size, length), None, length)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int, device: torch.device | str | None = None
    ) -> "Packing":
        """Packing of an input that came packed; no device sync, so it can be captured in a CUDA graph.

        cu_seqlens (Tensor [B + 1], int32): 0, then the end of every sequence; the last entry is num_tokens.
        device: where the tokens are; default: where cu_seqlens are, or, of those on the CPU, anywhere: they are checked
            there, and copied without waiting.

        Raises:
            TypeError, ValueError: wrong dtype or shape; on the CPU (elsewhere with BERT_FAST_DEBUG=1) also offsets that
                do not rise from 0 to num_tokens, or a sequence longer than max_seqlen.
        """
        check_shape("cu_seqlens", cu_seqlens, ("B + 1",))
        check_dtype("cu_seqlens", cu_seqlens, (torch.int32,))
        if len(cu_seqlens) == 0:
            raise ValueError("cu_seqlens: expected at least one entry (the leading 0), got none")
        if cu_seqlens.device != device:
            device = _device_for("cu_seqlens", cu_seqlens, device)
        max_seqlen = as_length("max_seqlen", max_seqlen)
        num_tokens = as_length("num_tokens", num_tokens)
        if not torch.compiler.is_compiling():  # compiled, the attention op checks them
            if num_tokens >= _MOST_TOKENS:
                raise ValueError(f"num_tokens: expected fewer than 2**31, got {num_tokens}")
            check_offsets("cu_seqlens", cu_seqlens, "max_seqlen", max_seqlen, num_tokens)
        if cu_seqlens.device != device:
            cu_seqlens = sent(cu_seqlens, device)
        coords = counted_coords(cu_seqlens, num_tokens)
        order = longest_first(cu_seqlens) if cu_seqlens.device.type == "cuda" else None
        return cls(cu_seqlens, max_seqlen, coords, None, None, order)

    def of_texts(self, cu_seqlens: Tensor, max_seqlen: int) -> "tuple[Packing, Packing]":
        """(layout of texts that lie one after another in the only row of this one, layout of that row).

        Coords of both are those of packed texts, so both draw the dropout masks of the texts packed, or padded.

        Raises: TypeError, ValueError as `from_cu_seqlens`.
        """
        device = self.coords.device
        texts = Packing.from_cu_seqlens(cu_seqlens, max_seqlen, self.coords.shape[0], device)
        return replace(texts, padded_shape=self.padded_shape), replace(self, coords=texts.coords)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.coords.shape[0]

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.cu_seqlens.shape[0] - 1

    @functools.cached_property
    def starts(self) -> Tensor:
        """Where sequences begin, int64 [B]: their first tokens, of those that have any."""
        return self.cu_seqlens[:-1].long()

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, ...] to [T, ...]; a packed input is returned as it is."""
        if self.padded_shape is None:
            return x
        self._check_sizes(x, self.padded_shape)
        flat = x.flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, ...] to [B, S, ...] with exact zeros on padding; a batch that came packed stays packed."""
        if self.padded_shape is None:
            return x
        self._check_sizes(x, (self.num_tokens,))
        if self.indices is None:
            return x.unflatten(0, self.padded_shape)
        batch_size, length = self.padded_shape
        padded = x.new_zeros((batch_size * length, *x.shape[1:]))
        return padded.index_copy(0, self.indices, x).unflatten(0, self.padded_shape)

    def first_tokens(self, x: Tensor) -> Tensor:
        """Rows of x [T, H] that start a sequence, [B, H] (BERT's [CLS]); exactly 0 for a sequence without tokens."""
        self._check_sizes(x, (self.num_tokens,))
        if x.dim() != 2:
            raise ValueError(f"x: expected tokens [T, H], got shape {list(x.shape)}")
        if not torch.compiler.is_compiling() and not x.shape[0]:  # compiled graphs must not ask for T
            return x.new_zeros((self.num_sequences, *x.shape[1:]))
        if self.indices is None and self.padded_shape is not None:
            return x.unflatten(0, self.padded_shape)[:, 0].contiguous()  # no padding: no sequence is empty
        if self.min_seqlen and not torch.compiler.is_compiling():
            return x.index_select(0, self.starts)
        starts, ends = self.cu_seqlens[:-1].long(), self.cu_seqlens[1:]
        first = x.index_select(0, starts.clamp(max=x.shape[0] - 1))
        return first.masked_fill((ends <= starts).unsqueeze(1), 0.0)

    def _check_sizes(self, x: Tensor, sizes: tuple[int, ...]) -> None:
        """Raises unless x is a Tensor with these first sizes beside the packing. Compiled graphs must not ask for T."""
        if torch.compiler.is_compiling():
            return
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            check_tensor("x", x)
        if x.shape[: len(sizes)] == sizes:
            if x.device != self.coords.device:
                check_same_device("x", x, "packing", self.coords)
            return
        raise ValueError(f"x: expected shape [{', '.join(map(str, sizes))}, ...], got {list(x.shape)}")


def unpad(x: Tensor, keep_mask: Tensor | None = None) -> tuple[Tensor, Packing]:
    """The kept tokens of a padded batch, sequence after sequence, and where they came from.

    Args:
        x (Tensor [B, S, ...], any dtype): a gradient flows back to it, exactly 0 on padding.
        keep_mask (Tensor [B, S], bool or number): nonzero marks a token to keep; None: all. Costs one device sync, and
            none where it is on the CPU, wherever x is.

    Returns:
        Tensor [T, ...], and the `Packing`, whose `cu_seqlens` and `max_seqlen` are what packed input of models and ops
        wants; its `pack` does the same for further tensors of the batch (labels).

    Raises:
        TypeError, ValueError: x is no Tensor of at least two dimensions or keep_mask is not [B, S] beside it.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
        >>> tokens, packing = bert_fast.unpad(ids, ids != 0)
        >>> tokens.tolist(), packing.cu_seqlens.tolist()
        ([5, 6, 7], [0, 2, 3])
    """
    check_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"x: expected a padded batch [B, S, ...], got shape {list(x.shape)}")
    if keep_mask is None:
        packing = Packing.full(x.shape[0], x.shape[1], x.device)
    else:
        check_shape("keep_mask", keep_mask, tuple(x.shape[:2]))
        check_host_or_same("keep_mask", keep_mask, "x", x)
        packing = Packing.from_keep_mask(keep_mask, x.device)
    return packing.pack(x), packing


def repad(x: Tensor, packing: Packing, *, padding_value: float = 0) -> Tensor:
    """What `unpad` undid: tokens [T, ...] to [B, S, ...], padding_value on padding.

    Args:
        x (Tensor [T, ...], any dtype): the tokens, or what was computed of them.
        packing: of `unpad`; or `Packing.from_cu_seqlens(cu_seqlens, max_seqlen, T)` of a batch that came packed, whose
            sequences then stand at the left of rows of S = max_seqlen.
        padding_value: what padding holds.

    Returns:
        Tensor [B, S, ...], dtype of x; a gradient flows back to x.

    Raises:
        TypeError, ValueError: x is no Tensor of T tokens on the device of the packing, or padding_value no number
            that its dtype holds.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
        >>> tokens, packing = bert_fast.unpad(ids, ids != 0)
        >>> bert_fast.repad(tokens, packing, padding_value=-1).tolist()
        [[5, 6, -1], [7, -1, -1]]
    """
    check_tensor("x", x)
    if not isinstance(packing, Packing):
        raise TypeError(f"packing: expected a Packing, as unpad returns it, got {type(packing).__name__}")
    padding = _as_padding(padding_value, x.dtype)
    if x.dim() == 0 or x.shape[0] != packing.num_tokens:
        raise ValueError(f"x: expected {packing.num_tokens} tokens (those of packing), got shape {list(x.shape)}")
    check_same_device("x", x, "packing", packing.coords)
    batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
    padded = x.new_full((batch_size * length, *x.shape[1:]), padding)
    rows, positions = packing.coords.long().unbind(1)
    return padded.index_copy(0, rows * length + positions, x).unflatten(0, (batch_size, length))


def _as_padding(value: Any, dtype: torch.dtype) -> Any:
    """padding_value as what PyTorch takes for a tensor of this dtype; raises where that holds no such number."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    is_number: bool = isinstance(value, numbers.Real)
    if not is_number:
        raise TypeError(f"padding_value: expected a number, got {type(value).__name__}")
    if dtype.is_floating_point or dtype.is_complex:
        is_held = abs(value) <= torch.finfo(dtype).max or value in (math.inf, -math.inf) or value != value
        kind: type = float
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_held = least <= value <= most and value == int(value)
        kind = int
    if not is_held:
        raise ValueError(
            f"padding_value: expected a number of {str(dtype).removeprefix('torch.')} (the dtype of x), got {value}"
        )
    return kind(value)


def counted_coords(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """(sequence, index in it) of every token, int32 [T, 2]: the coords of a batch that came packed. No device sync."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)
    return torch.stack((row, token - cu_seqlens[row]), dim=1)


def longest_first(cu_seqlens: Tensor) -> Tensor:
    """The sequences by falling length, equal ones in their order: int32 [B]. No device sync."""
    return _longest_first(cu_seqlens.diff())


def _longest_first(lengths: Tensor) -> Tensor:
    return lengths.argsort(stable=True, descending=True).int()


def _device_for(name: str, given: Tensor, device: Any) -> torch.device:
    """Where a layout goes that is made of what was given; raises ValueError unless that is there or on the CPU."""
    if device is None:
        return given.device
    if not isinstance(device, torch.device):
        device = _as_device(device)
    if device.index is None and device.type == given.device.type:
        return given.device
    if given.device != device and not is_host_beside(given, device):
        raise ValueError(f"{name}: expected device {device} or cpu, got {given.device}")
    return device


def sent(given: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without a wait for it: by way of memory that it may read when its turn comes.

    Raises: ValueError where a CUDA graph is captured, whose replays would not look at the host's tensor again.
    """
    if device.type == "cuda" and not torch.compiler.is_compiling():
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"keep_mask, cu_seqlens: expected device {device} while a CUDA graph is captured, got {given.device}"
            )
        given = given.pin_memory()
    return given.to(device, non_blocking=True)


def _as_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        got = repr(device) if isinstance(device, str) else type(device).__name__
        raise ValueError(f"device: expected a torch.device or its name, got {got}") from error


def _is_traced() -> bool:
    """Returns whether `torch.jit.trace` or `make_fx` records operators."""
    return (
        _get_tracing_state() is not None
        or _get_dispatch_mode(_PROXY) is not None
        or _get_dispatch_mode_pre_dispatch(_PROXY) is not None
    )


def _extent(lengths: Tensor) -> tuple[int, int, int]:
    """Kept tokens, the longest and the shortest length, in one transfer from the device."""
    if not len(lengths):
        return 0, 0, 0
    shortest, longest = lengths.aminmax()
    total, most, least = torch.stack((lengths.sum(), longest, shortest)).tolist()
    return total, most, least


def _offsets(lengths: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns cu_seqlens and, on a GPU, order. lengths: int64 [B]."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, _longest_first(lengths) if lengths.device.type == "cuda" else None


def _offsets_on_host(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Returns the same as `_offsets`, computed on the host; one copy to a GPU, no kernel."""
    offsets = [0, *itertools.accumulate(lengths)]
    if device.type != "cuda":
        return torch.tensor(offsets, dtype=torch.int32, device=device), None
    gap = -len(offsets) % (_ALIGNMENT // 4)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    both = sent(torch.tensor([*offsets, *[0] * gap, *order], dtype=torch.int32, device="cpu"), device)
    return both[: len(offsets)], both[len(offsets) + gap :]


def _nonzero(kept: Tensor, count: int) -> Tensor:
    """Where kept [B, S] is True, int64 [count, 2]; a GPU is not asked for the count again."""
    return torch.nonzero_static(kept, size=count) if kept.device.type == "cuda" else kept.nonzero()


def as_length(name: str, value: Any) -> int:
    """`value` as an int of at least 0: as `check_integer`."""
    length = check_integer(name, value)
    if not isinstance(length, torch.SymInt) and length < 0:
        raise ValueError(f"{name}: expected at least 0, got {length}")
    return length


def check_offsets(name: str, cu_seqlens: Tensor, max_name: str, max_seqlen: int, num_tokens: int) -> None:
    """Raises ValueError unless the offsets rise from 0 to num_tokens, in steps of at most max_seqlen.

    Only where that costs no device sync: on the CPU, elsewhere with BERT_FAST_DEBUG=1.
    """
    if cu_seqlens.device.type != "cpu" and not SETTINGS.debug:
        return
    if cu_seqlens._is_zerotensor():
        raise ValueError(f"{name}: expected a Tensor with memory, got one of zeros without any")
    offsets = cu_seqlens.tolist()  # plain integers: a tenth of the time of tensor operations on a few dozen numbers
    lengths = list(map(operator.sub, offsets[1:], offsets))
    if not offsets or offsets[0] != 0 or offsets[-1] != num_tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name}: expected offsets that rise from 0 to the number of tokens ({num_tokens}), got {offsets}"
        )
    longest = max(lengths, default=0)
    if longest > max_seqlen:
        raise ValueError(f"{max_name}: expected at least the longest sequence ({longest}), got {max_seqlen}")
