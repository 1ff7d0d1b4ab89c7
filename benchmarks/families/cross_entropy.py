"""Cases of cross_entropy: rows of BERT's vocabulary, padded to whole vectors and not; classes of a few numbers."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, installed
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.cross_entropy import CrossEntropy

_PADDED_VOCAB_SIZE = 30528  # rows are whole vectors


def cases() -> Iterator[KernelCase]:
    """Vocabularies at the counts of a pre-training step, its labels picked or not; classes of tokens; a few rows."""
    usual, fewest, most = bert.TOKENS
    few_labels, many_labels = (round(bert.LABEL_SHARE * num_tokens) for num_tokens in (fewest, most))
    for num_rows, num_classes in itertools.product((many_labels, usual), (bert.VOCAB_SIZE, _PADDED_VOCAB_SIZE)):
        yield _case(Use.GPU, num_rows, num_classes, torch.bfloat16)
    yield _case(Use.GPU, usual, bert.VOCAB_SIZE, torch.bfloat16, smoothing=0.1)
    yield _case(Use.GPU, usual, bert.VOCAB_SIZE, torch.bfloat16, ignored=0.85)
    yield _case(Use.GPU, most, 9, torch.bfloat16)
    yield _case(Use.SMOKE, few_labels, bert.VOCAB_SIZE, torch.bfloat16, ignored=0.5)
    yield _case(Use.SMOKE, fewest, 9, torch.bfloat16, ignored=0.5)
    yield _case(Use.CPU, few_labels, bert.VOCAB_SIZE, torch.float32)
    for dtype in bert.DTYPES:  # every kernel, rows that start at any address, rows without a label
        yield _case(Use.SMALL, 5, 1003, dtype, ignored=0.5)
        yield _case(Use.SMALL, 5, 1003, dtype, smoothing=0.1)
        yield _case(Use.SMALL, 33, 9, dtype, ignored=0.5)


def _case(
    uses: Use, num_rows: int, num_classes: int, dtype: torch.dtype, smoothing: float = 0.0, ignored: float = 0.0
) -> KernelCase:
    variant = f"smoothing{smoothing}" if smoothing else f"ignored{ignored}" if ignored else "labelled"
    make_it = partial(make, num_rows, num_classes, dtype, smoothing, ignored)
    return KernelCase("cross_entropy", f"{num_rows}x{num_classes}", dtype, variant, make_it, uses)


def make(
    num_rows: int, num_classes: int, dtype: torch.dtype, smoothing: float, ignored: float, device: torch.device
) -> Problem:
    """Scores wide enough apart that probabilities differ; upstream undoes the mean, so that gradients are of size 1."""
    logits = (torch.randn(num_rows, num_classes, device=device) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, num_classes, (num_rows,), device=device)
    labels[: int(num_rows * ignored)] = -100
    labels = labels[torch.randperm(num_rows, device=device)]
    num_labelled = num_rows - int(num_rows * ignored)
    inputs = (logits, labels)

    def fast(logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(logits, labels, label_smoothing=smoothing)

    def eager(logits: Tensor, labels: Tensor) -> Tensor:
        """As Hugging Face's models take their losses: in fp32."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, label_smoothing=smoothing)

    upstream = torch.tensor(float(num_labelled), device=device)
    row, scores = num_classes * dtype.itemsize, num_labelled * num_classes * dtype.itemsize
    return Problem(
        inputs, upstream, fast, eager,
        # Liger's overwrites its logits with their gradient, hence the copy.
        peers=installed(liger=(
            "liger_kernel.transformers.functional:liger_cross_entropy",
            lambda f, logits, labels: f(logits.clone(), labels, label_smoothing=smoothing),
        )),
        verify=partial(assert_gradients_close, "cross_entropy", ("loss", "dlogits"), fast, eager, inputs, upstream),
        bytes_moved={
            # Scores and z_label once, labels twice; losses are written and read, lse is written.
            "fwd": scores + num_labelled * dtype.itemsize + num_rows * (8 + 8 + 4) + num_rows * 8 + 4,
            "bwd": scores + num_labelled * 8 + num_rows * (row + 8) + num_rows * 8 + 8,
        },
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Two classes, and vocabularies whose rows start anywhere or at whole vectors; many share their code."""
    for dtype in bert.DTYPES:
        for num_classes, smoothing in itertools.product((2, bert.VOCAB_SIZE, 28996, 119547), (0.0, 0.1)):
            yield _aot_case(num_classes, dtype, smoothing)
        yield _aot_case(_PADDED_VOCAB_SIZE, dtype)
    for num_classes in (9, 100, 384, 1000, 2000, 4000):  # wider tiles of short rows; long rows of fewer warps
        yield _aot_case(num_classes, torch.bfloat16)
    # Cut out of a padded vocabulary; gradients are contiguous.
    yield _aot_case(bert.VOCAB_SIZE, torch.bfloat16, row_stride=_PADDED_VOCAB_SIZE)


def _aot_case(num_classes: int, dtype: torch.dtype, smoothing: float = 0.0, row_stride: int | None = None) -> AotCase:
    from bert_fast.triton import cross_entropy as family

    config = family.launch_config(num_classes, dtype)

    def launch() -> None:
        logits = torch.zeros(2, row_stride or num_classes, dtype=dtype)[:, :num_classes]
        labels = torch.zeros(2, dtype=torch.int64)
        a = CrossEntropy(logits, labels, label_smoothing=smoothing)
        loss, lse = family.cross_entropy_fwd(a)
        family.cross_entropy_bwd(a, loss, lse)

    name = f"C={num_classes} {dtype_name(dtype)}"
    name += f" smoothing={smoothing}" if smoothing else ""
    name += f" stride={row_stride}" if row_stride else ""
    if config.is_short or num_classes <= 512:  # a score for each token of a few texts: latency, nothing to count
        return AotCase(name, launch)
    live = num_classes // -(-num_classes // config.cols)
    # Narrow loads take more registers: the launcher promises no more than one resident program for such rows.
    resident = 1 if row_stride else family.RESIDENT_WARPS // config.num_warps
    return AotCase(
        name,
        launch,
        {
            "_cross_entropy_fwd_kernel": KernelFacts(live, dtype.itemsize, resident),
            "_cross_entropy_bwd_kernel": KernelFacts(live, 2 * dtype.itemsize, resident),
        },
    )
