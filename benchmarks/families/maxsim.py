"""Cases of maxsim: the scores of a batch's queries and documents, as a late interaction model (ColBERT) is trained."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.maxsim import Maxsim

_VECTOR = 128  # ColBERT's (Khattab and Zaharia 2020, section 3.2)
_QUERY_TOKENS, _DOCUMENT_TOKENS = 32, (100, 300)


def cases() -> Iterator[KernelCase]:
    """Batches of 32 and 128 queries with as many documents; a few tokens, of vectors of other sizes."""
    for dtype in (torch.bfloat16, torch.float32):
        yield _case(Use.GPU, 128, _DOCUMENT_TOKENS, _VECTOR, dtype)
    yield _case(Use.GPU | Use.SMOKE, 32, _DOCUMENT_TOKENS, _VECTOR, torch.bfloat16)
    yield _case(Use.GPU | Use.SMOKE | Use.CPU, 32, _DOCUMENT_TOKENS, _VECTOR, torch.float32)
    for vector_size, dtype in ((96, torch.float32), (128, torch.bfloat16), (200, torch.float16)):
        yield _case(Use.SMALL, 5, (1, 70), vector_size, dtype)


def _case(uses: Use, batch_size: int, lengths: tuple[int, int], vector_size: int, dtype: torch.dtype) -> KernelCase:
    shape = f"{batch_size}x{_QUERY_TOKENS}x{vector_size}"
    variant = f"documents{lengths[0]}to{lengths[1]}"
    return KernelCase("maxsim", shape, dtype, variant, partial(make, batch_size, lengths, vector_size, dtype), uses)


def make(
    batch_size: int, lengths: tuple[int, int], vector_size: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Unit vectors; eager gets documents padded to the longest, as sentence-transformers scores them."""
    counts = torch.randint(lengths[0], lengths[1] + 1, (batch_size,)).tolist()
    longest = max(counts)

    def unit(count: int) -> Tensor:
        t = bert.normal(count, vector_size, dtype=torch.float32, device=device)
        return torch.nn.functional.normalize(t, dim=1).to(dtype).requires_grad_()

    queries, documents = unit(batch_size * _QUERY_TOKENS), unit(sum(counts))
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * _QUERY_TOKENS
    upstream = torch.randn(batch_size, batch_size, device=device)
    is_padding = torch.arange(longest, device=device) >= offsets.diff()[:, None]

    def fast(queries: Tensor, documents: Tensor) -> Tensor:
        return ops.maxsim(queries, documents, cu_seqlens_q=starts, cu_seqlens_d=offsets, max_seqlen_d=longest)

    def scores(queries: Tensor, padded: Tensor) -> Tensor:
        similarities = torch.einsum("ash,bth->abst", queries.unflatten(0, (batch_size, -1)), padded)
        similarities = similarities.masked_fill(is_padding[:, None], torch.finfo(similarities.dtype).min)
        best = similarities.max(3).values
        return (best if best.dtype == torch.float64 else best.float()).sum(2)

    def eager(queries: Tensor, documents: Tensor) -> Tensor:
        return scores(queries, torch.nn.utils.rnn.pad_sequence(documents.split(counts), batch_first=True))

    op = "maxsim_on_gpu" if device.type == "cuda" else "maxsim"
    names = ("scores", "dqueries", "ddocuments")
    moved = bert.nbytes(queries, documents) + upstream.nbytes
    chosen = 4 * batch_size * len(queries)
    return Problem(
        (queries, documents), upstream, fast, eager,
        verify=partial(assert_gradients_close, op, names, fast, eager, (queries, documents), upstream),
        bytes_moved={"fwd": moved + chosen, "bwd": 2 * moved + chosen},
        flops={"fwd": 2 * len(queries) * documents.numel()},
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """All kernels, for ColBERT's vectors; for some of several tiles, the last of them not full."""
    for dtype in bert.DTYPES:
        yield _aot_case(_VECTOR, dtype)
    for vector_size, dtype in ((96, torch.bfloat16), (768, torch.bfloat16), (256, torch.float32)):
        yield _aot_case(vector_size, dtype)


def _aot_case(vector_size: int, dtype: torch.dtype) -> AotCase:
    from bert_fast.triton import maxsim as family

    def launch() -> None:
        tokens, offsets = torch.zeros(64, vector_size, dtype=dtype), torch.zeros(2, dtype=torch.int32)
        a = Maxsim(tokens, tokens, offsets, offsets, 64)
        scores, chosen = family.maxsim_fwd(a)
        family.maxsim_bwd(a, scores, chosen, {"queries", "documents"})

    is_half = dtype != torch.float32
    block_m, block_h = family.forward_tile(vector_size, dtype)
    forward = KernelFacts(
        block_m * family._BLOCK_N,
        multiply_adds=block_h,  # of a step along H
        needs_warpgroup_products=is_half,
    )
    kernels = {"_maxsim_fwd_kernel": forward}
    kernels["_maxsim_bwd_ddocuments_kernel"] = KernelFacts(needs_warpgroup_products=is_half)
    return AotCase(f"H={vector_size} {dtype_name(dtype)}", launch, kernels)
