"""Chunks of tokens for what lies between two products, and sums over chunks; elsewhere than on the CPU there is one.

What lies between the products of a feed-forward block, [T, I], is several times as wide as what goes in and comes out.
On the CPU it is made a chunk of tokens at a time, used while it is in the cache, and its memory used again.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_fast.torch._gemm import matmul, matmul_add, weight_gradient

# The most that a chunk of a [T, I] tensor takes. Two or three of them are alive at once: larger ones leave the cache,
# and the allocator gives their memory back to the system; smaller ones read and write the weights and their gradients
# more often. 512 tokens of BERT-base and -large, 1,024 of MiniLM in fp32: measured in docs/kernels/mlp.md.
CHUNK_BYTES = 2**23


def chunk_tokens(intermediate_size: int, dtype: torch.dtype, num_bytes: int = CHUNK_BYTES) -> int:
    """The most tokens of a chunk of so many bytes on the CPU: a power of two."""
    return 1 << max(1, num_bytes // max(1, intermediate_size * dtype.itemsize)).bit_length() - 1


def num_chunks(x: Tensor, intermediate_size: int, num_bytes: int = CHUNK_BYTES) -> int:
    """Of the tokens of x [T, ...]: at least one, also of no tokens; one on other devices."""
    if not x.is_cpu:
        return 1
    return max(1, -(-x.shape[0] // chunk_tokens(intermediate_size, x.dtype, num_bytes)))


def chunks(count: int, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Parts of the tensors [T, ...], of equally many tokens up to one; None in the place of a missing tensor."""
    if count == 1:
        return (tensors,)
    return zip(*(itertools.repeat(None, count) if t is None else t.tensor_split(count) for t in tensors), strict=True)


def joined(parts: list[Tensor]) -> Tensor:
    """What was made of all chunks, [T, ...]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sum_dtype(weight: Tensor, count: int) -> torch.dtype:
    """Of a gradient of weight that is still being added up: wide where there are several terms."""
    return torch.promote_types(weight.dtype, torch.float32) if count > 1 else weight.dtype


def add_product(total: Tensor | None, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """total + dy [T, N]^T @ x [T, K] of `dtype`, in the memory of total; it may be missing."""
    if total is None:
        return weight_gradient(dy, x, dtype)
    return matmul_add(dy.t(), x, total) if dtype == x.dtype else total.add_(matmul(dy.t(), x))


def add_rows(total: Tensor | None, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """total + the sum over rows of dy [T, N] of `dtype`, in the memory of total; it may be missing."""
    part = dy.sum(0, dtype=dtype)
    return part if total is None else total.add_(part)
