"""SPLADE's vectors from library products, some tokens and words at a time: the scores [T, V] never exist at once.

On the CPU whole texts go through a product together, as many as keep its result below 32 MB (there malloc keeps the
memory; larger pieces are fresh pages each time), and the maximum runs on where a text is longer than that. Backward
knows how many (text, word) pairs have a gradient, each of one token: a trained model has a few hundred words a text, of
30,522. Sums over pairs, read from the rows of weight and x where they lie, take less time than products with a matrix
that is nearly all zeros; products are left for short texts with many words.

Elsewhere nothing is known without a device sync: chunks of a fixed number of tokens, products of dense matrices.
"""

import itertools
from collections.abc import Iterator, Set

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.reference.precision import wide_dtype
from bert_fast.reference.splade import Splade, slope
from bert_fast.torch._gemm import cast, matmul, weight_gradient

# Of the scores of a chunk. CPU: just below 2^25, where glibc's malloc stops keeping memory. Elsewhere products need
# more rows to be fast, and three more tensors of that size exist for a while.
_CPU_CHUNK_BYTES, _OTHER_CHUNK_BYTES = 2**25 - 2**12, 2**26
# Words of a chunk: 256 tokens' scores in fp32 fit its memory.
_WORDS = 2**15
# Elements of a dense gradient of scores that a product treats in the time that a sum takes for a pair: 14 to 15 at
# H = 768 in fp32, on one thread of a processor with AVX-512.
_ELEMENTS_PER_PAIR = 16


def splade_fwd(a: Splade) -> tuple[Tensor, Tensor | None]:
    """(y, tokens or None), as `reference.splade`; scores are rounded to the dtype of x."""
    make = _maxima_of_texts if a.x.is_cpu else _maxima_of_chunks
    dtype = wide_dtype(a.x.dtype)
    top = torch.empty(a.num_texts, len(a.weight), dtype=dtype, device=a.x.device)
    tokens = torch.empty_like(top, dtype=torch.int32) if a.wants_tokens else None
    make(a, top, tokens)
    if tokens is not None:
        tokens.masked_fill_(top <= 0, -1)
    y = top.relu_().log1p_()
    return y.log1p_() if a.activation == "log1p_relu" else y, tokens


def _maxima_of_texts(a: Splade, top: Tensor, tokens: Tensor | None) -> None:
    """Fills top and tokens [B, V] with the greatest scores and whose they are; 0 for texts without tokens."""
    ends = a.cu_seqlens.tolist()
    for text, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            top[text] = 0
    for words in _blocks(len(a.weight)):
        weight, bias = cast(a.weight[words], a.x.dtype).t(), None if a.bias is None else cast(a.bias[words], a.x.dtype)
        for start, end, first in _chunks(ends, weight.shape[1] * a.x.element_size()):
            scores, text = matmul(a.x[start:end], weight, bias), first
            while text < a.num_texts and ends[text] < end:
                if ends[text] < ends[text + 1]:
                    _take(scores, start, ends[text], ends[text + 1], top[text, words],
                          None if tokens is None else tokens[text, words])  # fmt: skip
                text += 1


def _take(scores: Tensor, start: int, first: int, last: int, top: Tensor, tokens: Tensor | None) -> None:
    """Takes the maximum over tokens [first, last) of a text into top [V], of scores that begin with token `start`."""
    is_continued, low = first < start, max(first, start)
    of_text = scores[low - start : last - start]
    if tokens is None:
        torch.maximum(top, of_text.amax(0), out=top) if is_continued else top.copy_(of_text.amax(0))
        return
    value, token = of_text.max(0)
    token += low
    if is_continued:
        is_before = ~((value > top) | (value.isnan() & ~top.isnan()))
        value, token = torch.where(is_before, top, value), torch.where(is_before, tokens, token)
    top.copy_(value)
    tokens.copy_(token)


def _chunks(ends: list[int], bytes_per_row: int) -> Iterator[tuple[int, int, int]]:
    """(first token, end, first text) of chunks: whole texts, or equal parts of one that is too long for a chunk."""
    most = max(1, _CPU_CHUNK_BYTES // bytes_per_row)
    text, num_texts = 0, len(ends) - 1
    while text < num_texts:
        start, length = ends[text], ends[text + 1] - ends[text]
        if length > most:
            step = -(-length // -(-length // most))
            for first in range(start, ends[text + 1], step):
                yield first, min(first + step, ends[text + 1]), text
            text += 1
            continue
        first = text
        while text < num_texts and ends[text + 1] - start <= most:
            text += 1
        if ends[text] > start:
            yield start, ends[text], first


def _blocks(num_words: int) -> Iterator[slice]:
    """Words, about as many in each block."""
    step = -(-num_words // -(-num_words // _WORDS))
    return (slice(first, min(first + step, num_words)) for first in range(0, num_words, step))


def _maxima_of_chunks(a: Splade, top: Tensor, tokens: Tensor | None) -> None:
    """As `_maxima_of_texts`, without a device sync; minus infinity for texts without tokens."""
    weight, bias = cast(a.weight, a.x.dtype).t(), None if a.bias is None else cast(a.bias, a.x.dtype)
    top.fill_(-torch.inf)
    step = max(1, _OTHER_CHUNK_BYTES // (weight.shape[1] * top.element_size()))
    for start in range(0, len(a.x), step):
        scores = matmul(a.x[start : start + step], weight, bias).to(top.dtype)
        starts = (a.cu_seqlens.long() - start).clamp(0, len(scores))
        value = torch.segment_reduce(scores, "max", offsets=starts, unsafe=True)  # -inf for no tokens
        if tokens is None:
            torch.maximum(top, value, out=top)
            continue
        rows = torch.arange(len(scores), dtype=top.dtype, device=top.device)
        best = value.index_select(0, _texts(a.cu_seqlens, start, len(scores)))
        has_it = (scores == best) | scores.isnan()
        candidates = torch.where(has_it, rows[:, None], len(scores))
        token = torch.segment_reduce(candidates, "min", offsets=starts, unsafe=True)
        token = token.clamp(max=len(scores)).int() + start
        is_greater = (value > top) | (value.isnan() & ~top.isnan())
        tokens.copy_(torch.where(is_greater, token, tokens))
        torch.maximum(top, value, out=top)


def _texts(cu_seqlens: Tensor, start: int, count: int) -> Tensor:
    """The text of each of so many tokens, int64."""
    tokens = torch.arange(start, start + count, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


def splade_bwd(a: Splade, dy: Tensor, y: Tensor, tokens: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.splade`."""
    g = torch.where(tokens < 0, 0.0, dy * slope(y, a.activation))
    made = {"bias": g.sum(0).to(a.weight.dtype)} if "bias" in wants else {}
    if wants.isdisjoint(("x", "weight")):
        return made
    if a.x.is_cpu:
        pairs = g != 0
        number = int(pairs.count_nonzero())
        if number * _ELEMENTS_PER_PAIR <= len(a.x) * g.shape[1]:
            return made | _from_pairs(a, g, tokens, pairs, number, wants)
    return made | _from_chunks(a, g, tokens, wants)


def _from_pairs(a: Splade, g: Tensor, tokens: Tensor, pairs: Tensor, number: int, wants: Set[str]) -> dict[str, Tensor]:
    """Sums over pairs, in an order that the pairs alone decide; (text, word) is a pair where `pairs` [B, V]."""
    made = {}
    if "x" in wants:
        token, order = tokens[pairs].sort(stable=True)
        words = pairs.nonzero()[:, 1].int()[order]
        offsets = torch.searchsorted(token, torch.arange(len(a.x), dtype=torch.int32), out_int32=True)
        made["x"] = cast(_sums(a.weight, words, offsets, g[pairs][order]), a.x.dtype)
    if "weight" in wants:
        by_word = pairs.t().contiguous()
        counts = by_word.sum(1)
        offsets = (counts.cumsum(0) - counts).int()
        x = cast(a.x, a.weight.dtype)
        made["weight"] = _sums(x, tokens.t()[by_word], offsets, g.t()[by_word])
    return made


def _sums(rows: Tensor, index: Tensor, offsets: Tensor, factors: Tensor) -> Tensor:
    """Sums of rows[index] * factors, of the places from each offset to the next."""
    if not len(index):
        return rows.new_zeros(len(offsets), rows.shape[1])
    factors = cast(factors, rows.dtype)
    return F.embedding_bag(index, rows.contiguous(), offsets, mode="sum", per_sample_weights=factors)


def _from_chunks(a: Splade, g: Tensor, tokens: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Products with the gradient of the scores of some tokens and words at a time."""
    x, made, memory = a.x, {}, _CPU_CHUNK_BYTES if a.x.is_cpu else _OTHER_CHUNK_BYTES
    dtype = wide_dtype(x.dtype)
    if "x" in wants:
        made["x"] = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if "weight" in wants:
        made["weight"] = torch.zeros(a.weight.shape, dtype=dtype, device=x.device)
    for words in _blocks(len(a.weight)):
        weight, of_block, g_block = cast(a.weight[words], x.dtype), tokens[:, words], g[:, words]
        step = max(1, memory // (len(weight) * dtype.itemsize))
        for start in range(0, len(x), step):
            rows = x[start : start + step]
            texts = _texts(a.cu_seqlens, start, len(rows))
            here = torch.arange(start, start + len(rows), dtype=torch.int32, device=x.device)[:, None]
            dscores = g_block.index_select(0, texts).masked_fill_(of_block.index_select(0, texts) != here, 0)
            dscores = cast(dscores, x.dtype)
            if "x" in wants:
                made["x"][start : start + step] += matmul(dscores, weight)
            if "weight" in wants:
                made["weight"][words] += weight_gradient(dscores, rows, dtype)
    return {name: cast(t, x.dtype if name == "x" else a.weight.dtype) for name, t in made.items()}
