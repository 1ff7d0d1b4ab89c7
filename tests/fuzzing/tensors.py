"""Random tensors: sizes at which implementations change their ways, all layouts, and arguments gone wrong."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Case

DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SIZES = (1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 65)
_OTHER_DTYPES = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, *DTYPES)
_NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    2**31 - 1,
    2**31,
    -(2**31),
    2**63 - 1,
    -(2**63),
    2**64,
    0.5,
    -0.5,
    1.5,
    1e-30,
    1e30,
    1e400,
)


class Tensors:
    """Draws tensors of one case: all of one dtype, every one in some layout."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, case.rng
        self.dtype = self.rng.choice(DTYPES)
        self.scale = self.rng.choice((1.0, 1.0, 1.0, 0.05, 4.0))
        self.any_layout = case.chance(0.5)
        self._generator = torch.Generator().manual_seed(case.number)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """That of parameters: beside half precision also fp32."""
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if is_half and self.case.chance(0.5) else self.dtype

    def size(self, least: int = 1) -> int:
        """A size, small ones more often; 0 now and then where it is allowed."""
        return 0 if least == 0 and self.case.chance(0.04) else self.rng.choice(_SIZES)

    def maybe(self, make: Callable[[], Any], probability: float = 0.5) -> Any:
        """What is made, or None."""
        return make() if self.case.chance(probability) else None

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        values = torch.randn(shape, generator=self._generator).mul_(self.scale).to(dtype or self.dtype)
        if self.any_layout:
            values = relaid(self.rng, values)
        return values.requires_grad_(self.rng.random() < 0.7)

    def integers(self, high: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Integers in [0, high)."""
        dtype = dtype or self.rng.choice((torch.int64, torch.int64, torch.int32))
        values = torch.randint(max(high, 1), shape, generator=self._generator, dtype=dtype)
        return relaid(self.rng, values) if self.any_layout else values

    def seed(self) -> Tensor:
        """Of dropout."""
        return torch.tensor([self.rng.randrange(-(2**63), 2**63)])

    def offsets(self, most: int = 4) -> tuple[Tensor, int, list[int]]:
        """cu_seqlens, the longest sequence or more, and the lengths."""
        lengths = [self.rng.choice((0, 1, 1, 2, 3, 5, 8, 16, 17, 33)) for _ in range(self.rng.randint(0, most))]
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        slack = self.rng.choice((0, 0, 0, 1, 40))
        return torch.tensor(ends, dtype=torch.int32), max(lengths, default=0) + slack, lengths

    def coords(self, lengths: list[int], first: int = 0) -> Tensor:
        """(row, position) of every token, with holes now and then."""
        pairs = []
        for row, length in enumerate(lengths):
            position = first + self.rng.choice((0, 0, 0, 2))
            for _ in range(length):
                pairs.append((row, position))
                position += 1 if self.rng.random() < 0.9 else 2
        return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


def relaid(rng: Any, values: Tensor) -> Tensor:
    """The same values somewhere else in memory."""
    kind = rng.randrange(6)
    if values.dim() == 0 or kind < 2:
        return values
    if kind == 2:  # neighbours along the first dimension
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 3:  # every second column
        spread = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))[..., ::2]
        return spread.copy_(values)
    if kind == 4:  # in the middle of a larger buffer, at an odd place
        flat = values.new_zeros(values.numel() + 5)[3 : 3 + values.numel()]
        return flat.copy_(values.reshape(-1)).view(values.shape)
    wide = values.new_zeros((*values.shape[:-1], values.shape[-1] + 3))[..., 1 : 1 + values.shape[-1]]
    return wide.copy_(values)


# --- arguments gone wrong ---------------------------------------------------------------------------------------------


class Plain(Tensor):
    """A subclass of Tensor that changes nothing."""


def garbage(rng: Any) -> Any:
    """Something that is hardly ever what is wanted."""
    return rng.choice(_GARBAGE)()


_GARBAGE: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "",
    lambda: "abc",
    lambda: "\ud800",
    lambda: b"abc",
    lambda: True,
    lambda: -1,
    lambda: 2**64,
    lambda: 1.5,
    lambda: math.nan,
    lambda: math.inf,
    lambda: 1j,
    lambda: [],
    lambda: [1, 2],
    lambda: (),
    lambda: {},
    lambda: {1: 2},
    lambda: {"a", "b"},
    lambda: object(),
    lambda: object,
    lambda: len,
    lambda: iter(()),
    lambda: torch.float32,
    lambda: torch.zeros(()),
    lambda: torch.zeros(3),
    lambda: torch.zeros(0, 3),
    lambda: torch.zeros(2, 3, dtype=torch.int64),
    lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.zeros(2, 3, device="meta"),
    lambda: np.zeros(3, np.float32),
    lambda: np.int64(3),
    lambda: np.array("abc"),
    lambda: [torch.zeros(2)],
)


def spoil(rng: Any, value: Any) -> Any:
    """The value with something wrong about it, or in another form that may be as good."""
    if rng.random() < 0.2:
        return garbage(rng)
    if isinstance(value, Tensor):
        return rng.choice(_SPOILED_TENSORS)(rng, value)
    if isinstance(value, bool):
        return rng.choice((not value, int(value), None, "yes", 2))
    if isinstance(value, int | float):
        return rng.choice((*_NUMBERS, math.nan, math.inf, value + 1, -value, str(value), None, np.float32(1), True))
    if isinstance(value, str):
        return rng.choice(
            ("", value[:-1], value.upper(), value + " ", "\0", value.encode(errors="surrogatepass"), None, 3)
        )
    if isinstance(value, list | tuple):
        return _spoiled_list(rng, value)
    return rng.choice((*_NUMBERS, "abc", torch.zeros(1), torch.ones(2, 2), True, [1]))


def _spoiled_list(rng: Any, values: Any) -> Any:
    items = list(values)
    place = rng.randrange(len(items)) if items else 0
    match rng.randrange(6):
        case 0:
            del items[place : place + 1]
        case 1:
            items.append(items[place] if items else torch.zeros(2))
        case 2 | 3 if items:
            items[place] = spoil(rng, items[place])
        case 4:
            items.reverse()
        case _:
            return tuple(items)
    return items


def _resized(rng: Any, t: Tensor) -> Tensor:
    """One dimension longer, shorter or empty."""
    if t.dim() == 0:
        return t.detach().expand(rng.choice((0, 1, 2)))
    shape = list(t.shape)
    place = rng.randrange(len(shape))
    shape[place] = rng.choice((0, 1, shape[place] + 1, max(shape[place] - 1, 0), 2 * shape[place], 300))
    made = torch.zeros(shape, dtype=t.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(shape, t.shape, strict=True))
    if t.device.type == "cpu":
        made[common] = t.detach()[common]
    return made.requires_grad_(t.requires_grad)


def _revalued(rng: Any, t: Tensor) -> Tensor:
    """Some values replaced by others that matter."""
    if t.layout is not torch.strided or t.is_nested:
        return t
    copy = t.detach().clone(memory_format=torch.contiguous_format)
    if copy.numel() == 0 or copy.device.type != "cpu":
        return copy
    place = rng.randrange(copy.numel())
    if t.dtype.is_floating_point:
        copy.view(-1)[place] = rng.choice((math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-45))
    elif t.dtype == torch.bool:
        copy.view(-1)[place] = not copy.view(-1)[place]
    else:
        bounds = torch.iinfo(t.dtype) if not t.dtype.is_complex else torch.iinfo(torch.int8)
        copy.view(-1)[place] = rng.choice(
            (bounds.min, bounds.max, 0, 1, 5, 100, max(-100, bounds.min), 70_000 % bounds.max)
        )
    return copy.requires_grad_(t.requires_grad)


def _expanded(rng: Any, t: Tensor) -> Tensor:
    """Every row the same memory."""
    return t[:1].expand(t.shape) if t.dim() and len(t) else t


def _sparse(t: Tensor) -> Tensor:
    return t.detach().as_subclass(Tensor).to_sparse()  # of other classes it cannot be made


_SPOILED_TENSORS: tuple[Callable[[Any, Tensor], Any], ...] = (
    lambda rng, t: None,
    _resized,
    _resized,
    _resized,
    _revalued,
    _revalued,
    _revalued,
    _expanded,
    lambda rng, t: t.detach().to(rng.choice(_OTHER_DTYPES)),
    lambda rng, t: t.detach().to(rng.choice(_OTHER_DTYPES)),
    lambda rng, t: t.unsqueeze(rng.randint(0, t.dim())),
    lambda rng, t: t[0] if t.dim() and len(t) else t,
    lambda rng, t: t.flatten(),
    lambda rng, t: t.transpose(0, -1) if t.dim() else t,
    lambda rng, t: t.detach().to("meta"),
    lambda rng, t: _sparse(t) if t.dim() and t.dtype != torch.bool and not t.is_meta else t,
    lambda rng, t: t.detach().as_subclass(Plain),
    lambda rng, t: torch.nn.Parameter(t.detach()) if t.is_floating_point() else t,
    lambda rng, t: t.detach().neg().neg() if t.dtype != torch.bool else t,
    lambda rng, t: torch._neg_view(t.detach()) if t.is_floating_point() else t,
    lambda rng, t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda rng, t: t.detach().cpu().float().clone().numpy() if t.device.type == "cpu" else t,
    lambda rng, t: t.detach().clone().tolist() if t.device.type == "cpu" and t.numel() < 100 else t,
    lambda rng, t: t[:0] if t.dim() else t,
)
