"""What is run: small cases of all op families, and what only some calls of attention and of products ask for."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import KernelCase, Problem
from benchmarks.registry import family_names, kernel_cases
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth

_ATTENTION = {
    "S130 causal D128 p0.1": AttentionCase((130,), num_heads=1, head_dim=128, causal=True, dropout_p=0.1),
    "S100 causal": AttentionCase((100, 3), num_heads=1, head_dim=64, causal=True),
    "S140 bias p0.1": AttentionCase((140, 3), num_heads=1, head_dim=64, bias="BAQK", dropout_p=0.1),
    # Holes make several windows of distances for a tile of scores.
    "S70 relative_key holes": AttentionCase((70, 3), num_heads=1, head_dim=64, relative="relative_key", holes=True),
    "S70 relative_key_query holes p0.1": AttentionCase(
        (70, 3), num_heads=1, head_dim=64, relative="relative_key_query", holes=True, dropout_p=0.1
    ),
    "S140 fewer keys": AttentionCase((140, 5), (3, 150), num_heads=1, head_dim=40, dropout_p=0.1),
}
_SPLIT = (((128, 96, 200), 3), ((70, 40, 264), 2))  # (M, N, K), parts of the sum over K


def cases(families: list[str]) -> Iterator[KernelCase]:
    """All of these families, or of all where none is named."""
    wanted = families or family_names()
    yield from kernel_cases("small", wanted)
    for dtype in (torch.bfloat16, torch.float32):
        if "attention" in wanted:
            for name, case in _ATTENTION.items():
                shape = f"{sum(case.lengths)}x{case.num_heads}x{case.head_dim}"
                yield KernelCase("attention", shape, dtype, name, partial(_attention, case, dtype))
        if "linear" in wanted:
            for shape, parts in _SPLIT:
                name = "x".join(map(str, shape))
                yield KernelCase("linear", name, dtype, f"split {parts}", partial(_split_sum, shape, parts, dtype))


def _problem(verify: Callable[[], None]) -> Problem:
    """Only to be verified."""
    return Problem((), None, lambda: None, lambda: None, bytes_moved={}, verify=verify)


def _attention(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> Problem:
    def verify() -> None:
        actual, plain, truth = case.run("triton", dtype), case.plain(dtype), case.truth(dtype)
        for name, result in actual.items():
            assert_close_to_truth("triton_attention", name, result, plain[name], truth[name])

    return _problem(verify)


def _split_sum(shape: tuple[int, int, int], parts: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """A product whose sum is made in parts, which a second kernel adds."""

    def verify() -> None:
        from bert_fast.triton import _gemm
        from bert_fast.triton._gemm_tiles import Tile

        m, n, k = shape
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        made = _gemm.product(a, b, tile=Tile(64, 32, 32, split_k=parts))
        assert_close_to_truth("linear", "y", made, a @ b, a.double() @ b.double())

    return _problem(verify)
