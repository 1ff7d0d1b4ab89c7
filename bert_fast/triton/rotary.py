"""Rotary position embedding in Triton, forward and backward, which is the turn by the negative angle.

    y1 = x1 cos - x2 sin          pairs: halves of a head, or neighbours
    y2 = x2 cos + x1 sin

Shapes: x, y [T, P, A, D], P parts (query, key, value; or 1), the first two of which are turned; cos, sin [T, D / 2],
fp32.
Bytes per token, e bytes an element: in place 4 A D e of query and key, read and written, else 6 A D e, value with them;
and 4 D of cos and sin, from memory for the first part and from the cache for the second.
Precision: fp32 throughout, rounded once. Deterministic: every element is written by one thread.

A program turns a block of tokens of one part: cos and sin of these tokens stay in registers while it walks over the
heads, a tile [TOKENS, HEADS, D / 2] of x1 and one of x2 at a time, 128 bits a thread. Everything of a tile is read
before any of it is written, so y may be x.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.rotary import Rotary, turned_parts
from bert_fast.triton._launch import ceil_div
from bert_fast.triton._launch_plan import launch_plan


@triton.jit
def _turn(x1, x2, cos, sin):
    """Both numbers of pairs after the turn, in fp32."""
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


_STRIDES = [f"{tensor}_{of}_stride" for tensor in "xy" for of in ("token", "part", "head")]


@triton.jit(do_not_specialize=[*_STRIDES, "n_tokens"])
def _rotary_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, x_token_stride, x_part_stride, x_head_stride, y_token_stride, y_part_stride,
    y_head_stride, n_tokens, sign, N_HEADS: tl.constexpr, N_FREQS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, FREQS: tl.constexpr, STRIDE_UNIT: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one part. Strides count STRIDE_UNIT elements, so that Triton sees heads start at vectors."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None].to(tl.int64)
    part = tl.program_id(1)
    tile_head = tl.arange(0, HEADS)[None, :, None]
    freq = tl.arange(0, FREQS)[None, None, :]
    col = tl.arange(0, 2 * FREQS)[None, None, :]
    mask_token = token < n_tokens
    # 1. Where the tokens of this part start.
    x_ptr += (token * x_token_stride + part * x_part_stride) * STRIDE_UNIT
    y_ptr += (token * y_token_stride + part * y_part_stride) * STRIDE_UNIT
    # 2. Of a value everything is copied, [TOKENS, HEADS, D] at a time.
    if part >= TURNED:
        for first in tl.static_range(0, N_HEADS, HEADS):
            head = first + tile_head
            mask = mask_token & (head < N_HEADS) & (col < 2 * N_FREQS)
            x = tl.load(x_ptr + head * x_head_stride * STRIDE_UNIT + col, mask=mask)
            tl.store(y_ptr + head * y_head_stride * STRIDE_UNIT + col, x, mask=mask)
        return
    # 3. The tokens' angles, [TOKENS, 1, D / 2].
    mask_angle = mask_token & (freq < N_FREQS)
    cos = tl.load(cos_ptr + token * N_FREQS + freq, mask=mask_angle, other=0.0)
    sin = tl.load(sin_ptr + token * N_FREQS + freq, mask=mask_angle, other=0.0) * sign
    # 4. Head after head.
    for first in tl.static_range(0, N_HEADS, HEADS):
        head = first + tile_head
        mask_head = mask_token & (head < N_HEADS)
        if INTERLEAVED:
            mask = mask_head & (col < 2 * N_FREQS)
            x = tl.load(x_ptr + head * x_head_stride * STRIDE_UNIT + col, mask=mask, other=0.0)
            x1, x2 = tl.split(tl.reshape(x, [TOKENS, HEADS, FREQS, 2]))
            y1, y2 = _turn(x1, x2, cos, sin)
            y = tl.reshape(tl.join(y1, y2), [TOKENS, HEADS, 2 * FREQS]).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + head * y_head_stride * STRIDE_UNIT + col, y, mask=mask)
        else:
            mask = mask_head & (freq < N_FREQS)
            x_head = x_ptr + head * x_head_stride * STRIDE_UNIT + freq
            y_head = y_ptr + head * y_head_stride * STRIDE_UNIT + freq
            x1 = tl.load(x_head, mask=mask, other=0.0)
            x2 = tl.load(x_head + N_FREQS, mask=mask, other=0.0)
            y1, y2 = _turn(x1, x2, cos, sin)
            tl.store(y_head, y1.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_head + N_FREQS, y2.to(y_ptr.dtype.element_ty), mask=mask)


_THREADS = 128
_HEADS = 4  # of a tile: 512 neighbouring bytes of a token, where D is 64 and 2 bytes wide


@dataclass(frozen=True)
class LaunchConfig:
    """Tiles [tokens, heads, freqs] of one of a pair's numbers."""

    vector: int  # neighbouring numbers of one thread, 128 bits
    tokens: int
    heads: int
    freqs: int


def launch_config(num_heads: int, num_freqs: int, dtype: torch.dtype) -> LaunchConfig:
    """One vector of each of a pair's numbers to a thread, as long as a token's heads do not ask for more."""
    vector = 16 // dtype.itemsize
    heads, freqs = min(triton.next_power_of_2(num_heads), _HEADS), triton.next_power_of_2(num_freqs)
    return LaunchConfig(vector, max(1, _THREADS * vector // (heads * freqs)), heads, freqs)


def rotary_fwd(a: Rotary) -> Tensor:
    """y, as `reference.rotary`, of fp32, fp16 or bf16; a new contiguous tensor."""
    return _turned(a, a.qkv, 1.0)


def rotary_bwd(a: Rotary, dy: Tensor) -> dict[str, Tensor]:
    """Gradients by name, as `reference.rotary`; dy as qkv."""
    return {"qkv": _turned(a, dy, -1.0)}


def rotary_in_place(a: Rotary, is_backward: bool) -> None:
    """As `reference.rotary`."""
    sign = -1.0 if is_backward else 1.0
    if a.qkv.stride(3) == 1:
        _launch(a, a.qkv, a.qkv, turned_parts(a.qkv.shape[1]), sign)
    else:
        a.qkv.copy_(_turned(a, a.qkv, sign))


def _turned(a: Rotary, x: Tensor, sign: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(a, x if x.stride(3) == 1 else x.contiguous(), y, x.shape[1], sign)
    return y


def _launch(a: Rotary, x: Tensor, y: Tensor, num_parts: int, sign: float) -> None:
    """Turns x into y; num_parts: of them, those that y does not have yet."""
    num_tokens, parts, num_heads, head_dim = x.shape
    if not num_tokens or not num_heads:
        return
    config = launch_config(num_heads, head_dim // 2, x.dtype)
    strides = (*x.stride()[:3], *y.stride()[:3])
    stride_unit = math.gcd(config.vector, *strides)
    launch_plan(
        _rotary_kernel,
        N_HEADS=num_heads,
        N_FREQS=head_dim // 2,
        TOKENS=config.tokens,
        HEADS=config.heads,
        FREQS=config.freqs,
        STRIDE_UNIT=stride_unit,
        TURNED=turned_parts(parts),
        INTERLEAVED=a.interleaved,
        num_warps=_THREADS // 32,
        enable_fp_fusion=True,
    )(
        (ceil_div(num_tokens, config.tokens), num_parts),
        (x, y, a.cos.contiguous(), a.sin.contiguous()),
        (*(stride // stride_unit for stride in strides), num_tokens, sign),
    )
