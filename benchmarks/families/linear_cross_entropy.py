"""Cases of linear_cross_entropy: rows with a label, their logits over BERT's vocabulary, the loss, all gradients.

bert_fast, and Liger, make gradients in forward, so forward and backward are timed together.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, installed
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.linear_cross_entropy import GRADIENTS, LinearCrossEntropy

_IGNORED = -100
_MOST_FULL_POSITIONS_ON_CPU = 1024  # beyond, logits at every position take seconds each time


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; label smoothing at the size that goals are set for; a few rows."""
    base, words = bert.BASE.hidden, bert.VOCAB_SIZE
    for num_tokens, size in itertools.product(bert.TOKENS, bert.SIZES):
        # Rows for one product of logits, and for several, whose gradients are summed up by `addmm`.
        is_smoke = size is bert.BASE and num_tokens <= 16384
        yield _case(Use.GPU | Use.SMOKE if is_smoke else Use.GPU, num_tokens, size.hidden, words, torch.bfloat16)
    yield _case(Use.GPU, bert.TOKENS[0], base, words, torch.bfloat16, smoothing=0.1)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, base, words, torch.float32)
    yield _case(Use.CPU, _MOST_FULL_POSITIONS_ON_CPU, bert.MINILM.hidden, words, torch.float32)
    # A vocabulary that is no multiple of anything, label smoothing, rows without a label, groups.
    yield _case(Use.SMALL, 80, 41, 1003, torch.float32)
    yield _case(Use.SMALL, 80, 41, 1003, torch.float32, smoothing=0.1)
    yield _case(Use.SMALL, 80, 40, 1003, torch.float16, ignored=0.5)
    yield _case(Use.SMALL, 80, 64, 1024, torch.bfloat16)
    yield _case(Use.SMALL, 80, 41, 1003, torch.float32, num_groups=7)
    yield _case(Use.SMALL, 80, 64, 1024, torch.bfloat16, num_groups=7)


def _case(
    uses: Use, num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype, smoothing: float = 0.0,
    ignored: float = 0.0, num_groups: int = 0,
) -> KernelCase:  # fmt: skip
    variant = f"smoothing{smoothing}" if smoothing else f"ignored{ignored}" if ignored else "labelled"
    variant = f"groups{num_groups}" if num_groups else variant
    return KernelCase(
        "linear_cross_entropy", f"{num_tokens}x{hidden}x{vocab_size}", dtype, variant,
        partial(make, num_tokens, hidden, vocab_size, dtype, smoothing, ignored, num_groups=num_groups), uses,
    )  # fmt: skip


def make(
    num_tokens: int,
    hidden: int,
    vocab_size: int,
    dtype: torch.dtype,
    smoothing: float,
    ignored: float,
    device: torch.device,
    num_groups: int = 0,
) -> Problem:
    """The labelled rows of a batch of `num_tokens`; hf_full_positions gets the whole batch, which has the same loss.

    ignored: share of the rows given to everybody that have no label after all. num_groups: of rows and of classes, of
    which a row leaves out those of its own; 0: none is left out.
    """
    num_rows = round(num_tokens * bert.LABEL_SHARE)
    x_all = bert.normal(num_tokens, hidden, dtype=dtype, device=device)
    rows = torch.randperm(num_tokens, device=device)[:num_rows].sort().values
    weight, bias = bert.weight(vocab_size, hidden, dtype, device), bert.bias(vocab_size, dtype, device)
    labels = torch.randint(0, vocab_size, (num_rows,), device=device)
    labels[: round(num_rows * ignored)] = _IGNORED
    labels_all = torch.full((num_tokens,), _IGNORED, device=device).index_copy_(0, rows, labels)
    inputs = (x_all[rows].requires_grad_(), weight, bias, labels)
    upstream = torch.ones((), device=device)
    groups, left_out = {}, None
    if num_groups:
        of_rows, of_classes = (torch.arange(count, device=device) % num_groups for count in (num_rows, vocab_size))
        groups = {"row_groups": of_rows, "class_groups": of_classes}
        left_out = (of_rows[:, None] == of_classes).scatter_(1, labels[:, None], False)

    def fast(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, weight, bias, labels, label_smoothing=smoothing, **groups)

    def eager(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        """The loss in fp32, as under autocast."""
        logits = F.linear(x, weight, bias)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if left_out is not None:
            wide = wide.masked_fill(left_out, -torch.inf)
        return F.cross_entropy(wide, labels, label_smoothing=smoothing)

    op = bert.tolerances_of("linear_cross_entropy", device)

    def verify() -> None:
        # The mean undone, so that gradients are of size 1, as the table of tolerances counts on.
        num_labelled = torch.tensor(float((labels != _IGNORED).sum()), device=device)
        suffix = "_on_gpu" if device.type == "cuda" else ""
        names = tuple(name + suffix for name in ("loss", "dx", "dweight", "dbias"))
        assert_gradients_close(op, names, fast, eager, inputs, num_labelled)

    peers = {}  # others know no groups
    if not num_groups and device.type == "cuda":
        liger = "liger_kernel.transformers.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss"
        peers |= installed(liger=(liger, partial(_liger, smoothing)))
    if not num_groups and (device.type != "cpu" or num_tokens <= _MOST_FULL_POSITIONS_ON_CPU):
        peers["hf_full_positions"] = eager
    product = 2 * num_rows * hidden * vocab_size
    wide_weight = 4 * weight.numel()  # the weight's gradient, summed up in fp32 between chunks
    return Problem(
        inputs, upstream, fast, eager, verify=verify, peers=peers,
        own_inputs={"hf_full_positions": ((x_all.requires_grad_(), weight, bias, labels_all), upstream)},
        bytes_moved={"fwd_bwd": 2 * bert.nbytes(*inputs[:3]) + labels.nbytes + 2 * wide_weight},
        flops={"fwd_bwd": 3 * product},
    )  # fmt: skip


def _liger(smoothing: float, loss: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return loss(ignore_index=_IGNORED, label_smoothing=smoothing)(weight, x, labels, bias)


def aot_cases() -> Iterator[AotCase]:
    """The kernels of a chunk's logits for BERT's vocabulary, with and without gradients, and for a few classes."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        yield _scale_case(dtype)
    for dtype in dtypes:
        for smoothing in (0.0, 0.1):
            yield _aot_case(bert.VOCAB_SIZE, dtype, smoothing)
        yield _aot_case(bert.VOCAB_SIZE, dtype, wants_gradient=False)
    yield _aot_case(bert.VOCAB_SIZE, torch.float32, has_groups=True)  # embeddings: scores in fp32
    for num_words in (9, 3000):  # fewer warps
        yield _aot_case(num_words, torch.bfloat16)


def _scale_case(dtype: torch.dtype) -> AotCase:
    """Backward, for gradients of BERT's widths; dbias, of an odd length and small, is in the other cases."""
    from bert_fast.triton import linear_cross_entropy as family

    def launch() -> None:
        x, made = torch.zeros(2, 768, dtype=dtype), torch.zeros(2, 768)
        labels = torch.zeros(2, dtype=torch.int64)
        a = LinearCrossEntropy(x, x, None, labels, _IGNORED, 0.0)
        family.linear_cross_entropy_bwd(a, torch.ones(()), {"x": made})

    facts = KernelFacts(family._SCALE_BLOCK, 4 + dtype.itemsize)
    return AotCase(f"H=768 {dtype_name(dtype)}", launch, {"_linear_cross_entropy_scale_kernel": facts})


def _aot_case(
    num_words: int, dtype: torch.dtype, smoothing: float = 0.0, wants_gradient: bool = True, has_groups: bool = False
) -> AotCase:
    """One forward of two rows; dbias as of a first chunk and of a later one, and scaled. `linear` has the products."""
    from bert_fast.triton import _gemm
    from bert_fast.triton import linear_cross_entropy as family

    @_gemm.by_library()
    def launch() -> None:
        x, weight = torch.zeros(2, 16, dtype=dtype), torch.zeros(num_words, 16, dtype=dtype)
        labels = torch.zeros(2, dtype=torch.int64)
        groups = (torch.ones(2, dtype=torch.int64), torch.zeros(num_words, dtype=torch.int64)) if has_groups else ()
        a = LinearCrossEntropy(x, weight, weight[:, 0], labels, _IGNORED, smoothing, *groups)
        loss, sums = family.linear_cross_entropy_fwd(a, GRADIENTS if wants_gradient else set())
        if wants_gradient:
            family._column_sums(torch.zeros(2, family.padded_words(num_words), dtype=dtype), sums["bias"], True)
            family.linear_cross_entropy_bwd(a, loss, {"bias": sums["bias"]})

    name = f"V={num_words} {dtype_name(dtype)}"
    name += f" smoothing={smoothing}" if smoothing else ""
    name += "" if wants_gradient else " loss alone"
    name += " groups" if has_groups else ""
    if num_words < bert.VOCAB_SIZE:  # bound by latency: nothing to count
        return AotCase(name, launch)
    vector = family._VECTOR_BYTES // dtype.itemsize
    lanes = family.row_warps(num_words, dtype) * family._LANES_PER_WARP
    num_reads = 2 if wants_gradient else 1  # the second reading of a row finds it in the cache
    return AotCase(
        name,
        launch,
        {
            "_linear_cross_entropy_rows_kernel": KernelFacts(
                family._CHUNKS * lanes * vector, num_reads * dtype.itemsize
            ),
            "_linear_cross_entropy_dbias_kernel": KernelFacts(family._SUM_ROWS * family._SUM_COLS, dtype.itemsize),
        },
    )
