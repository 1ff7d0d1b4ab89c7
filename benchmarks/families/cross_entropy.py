"""Cases of cross_entropy: rows of BERT's vocabulary, padded to whole vectors and not; classes of a few numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.cross_entropy import CrossEntropy

# 15 % of 32,768 tokens, and as many as a masked-LM head sees without picking rows.
_ROWS = (4915, 16384)
_VOCABULARIES = (30522, 30528)


def _case(
    num_rows: int, num_classes: int, dtype: torch.dtype, smoothing: float = 0.0, ignored: float = 0.0
) -> KernelCase:
    variant = f"smoothing{smoothing}" if smoothing else f"ignored{ignored}" if ignored else "labelled"
    return KernelCase(
        "cross_entropy", f"{num_rows}x{num_classes}", dtype, variant,
        lambda device: make(num_rows, num_classes, dtype, smoothing, ignored, device),
    )  # fmt: skip


def cases() -> Iterator[KernelCase]:
    """bf16: vocabularies at the counts of a pre-training step, token and sequence classification."""
    for num_rows in _ROWS:
        for num_classes in _VOCABULARIES:
            yield _case(num_rows, num_classes, torch.bfloat16)
    yield _case(16384, 30522, torch.bfloat16, smoothing=0.1)
    yield _case(16384, 30522, torch.bfloat16, ignored=0.85)
    yield _case(32768, 9, torch.bfloat16)


def smoke_cases() -> Iterator[KernelCase]:
    """The masked words of 4,096 tokens, and a few classes for each token."""
    yield _case(614, 30522, torch.bfloat16, ignored=0.5)
    yield _case(4096, 9, torch.bfloat16, ignored=0.5)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: every kernel, rows that start at any address, rows without a label."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield _case(5, 1003, dtype, ignored=0.5)
        yield _case(5, 1003, dtype, smoothing=0.1)
        yield _case(33, 9, dtype, ignored=0.5)


def cpu_cases() -> Iterator[KernelCase]:
    """A batch of 4,096 tokens: its masked words."""
    yield _case(614, 30522, torch.float32)


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
        inputs, upstream, fast, eager, peers=_peers(smoothing),
        verify=lambda: assert_gradients_close("cross_entropy", ("loss", "dlogits"), fast, eager, inputs, upstream),
        bytes_moved={
            # Scores and z_label once, labels twice; losses are written and read, lse is written.
            "fwd": scores + num_labelled * dtype.itemsize + num_rows * (8 + 8 + 4) + num_rows * 8 + 4,
            "bwd": scores + num_labelled * 8 + num_rows * (row + 8) + num_rows * 8 + 8,
        },
    )  # fmt: skip


def _peers(smoothing: float) -> dict[str, Callable[..., Any]]:
    """Liger's cross entropy, where it imports. It overwrites its logits with their gradient, hence the copy."""
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError:
        return {}
    return {"liger": lambda logits, labels: liger_cross_entropy(logits.clone(), labels, label_smoothing=smoothing)}


def aot_cases() -> Iterator[AotCase]:
    """Two classes, and vocabularies whose rows start anywhere or at whole vectors; many share their code."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for num_classes in (2, 30522, 28996, 119547):
            for smoothing in (0.0, 0.1):
                yield _aot_case(num_classes, dtype, smoothing)
        yield _aot_case(30528, dtype)
    for num_classes in (9, 100, 384, 1000, 2000, 4000):  # wider tiles of short rows; long rows of fewer warps
        yield _aot_case(num_classes, torch.bfloat16)
    yield _aot_case(30522, torch.bfloat16, row_stride=30528)  # cut out of a padded vocabulary; gradients are contiguous


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
        return AotCase(name, None, launch, {}, {})
    kernels = ("_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel")
    steps = -(-num_classes // config.cols)
    return AotCase(
        name, None, launch,
        live_elements=dict.fromkeys(kernels, num_classes // steps),
        # Narrow loads take more registers, and nobody counts on them.
        resident_programs={} if row_stride else dict.fromkeys(kernels, family.RESIDENT_WARPS // config.num_warps),
        bytes_per_element=dict(zip(kernels, (dtype.itemsize, 2 * dtype.itemsize), strict=True)),
    )  # fmt: skip
