"""pytest-benchmark entry points for every case of the registry.

    python -m pytest benchmarks [-k layer_norm] [--benchmark-save NAME] [--benchmark-compare]

Wall time, which is what pytest-benchmark measures: of a forward and a backward (or a step), launches included. For a
kernel's own time and what it is compared with, see `make gpu` and docs/benchmarks.md. Without a GPU the cases at full
BERT shapes skip, small ones run, and whole models run with two layers and batches of two.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.kernels.case import KernelCase, Use
from benchmarks.kit import bert
from benchmarks.models import build
from benchmarks.models import forward_backward as models
from benchmarks.registry import CASES, Case, kernel_cases
from benchmarks.tokenizers import contestants
from benchmarks.tokenizers.cases import CASES as TOKENIZER_CASES
from benchmarks.tokenizers.cases import TokenizerCase
from benchmarks.tokenizers.corpora import CORPORA

HAS_GPU = torch.cuda.is_available()
ROUNDS = 20 if HAS_GPU else 5


ON_A_CPU = Use.CPU | Use.SMALL
ON_GPU = pytest.mark.skipif(not HAS_GPU, reason="full BERT shapes are timed on a CUDA or ROCm device")


def _kernel_parameter(case: KernelCase) -> Any:
    return pytest.param(case, id=case.name, marks=() if case.uses & ON_A_CPU else ON_GPU)


@pytest.mark.parametrize("case", map(_kernel_parameter, kernel_cases(Use.GPU if HAS_GPU else Use.GPU | ON_A_CPU)))
def test_kernel(case: KernelCase, benchmark: Any) -> None:
    """A case that is wrong fails here and is not timed."""
    device = torch.device("cuda" if HAS_GPU else "cpu")
    torch.manual_seed(0)
    problem = case.make(device)
    problem.verify()
    leaves = [t for t in problem.inputs if t.requires_grad]

    def run() -> None:
        output: Any = problem.fast(*problem.inputs)
        if problem.upstream is not None:
            torch.autograd.grad(output, leaves, problem.upstream.to(output.dtype))
        if HAS_GPU:
            torch.cuda.synchronize()

    benchmark.extra_info.update(family=case.family, bytes=sum(problem.bytes_moved.values()))
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_model(case: Case, benchmark: Any) -> None:
    """bert_fast's side of a whole-model case."""
    is_training = case.mode == "training"
    case = case if HAS_GPU else replace(case, batch_size=2)
    try:
        lengths = build.draw_lengths(case, 1)[0]
    except FileNotFoundError as error:
        pytest.skip(f"the lengths of real texts are not there: {error.filename}")
    torch.manual_seed(0)
    device = torch.device("cuda" if HAS_GPU else "cpu")
    ours, _ = models.make_models(case.shape, 0.1 if is_training else 0.0, None if HAS_GPU else 2)
    batch = {name: tensor.to(device) for name, tensor in models.padded_batch(lengths).items()}
    hidden_size = bert.BY_NAME[case.shape].hidden
    gradient = torch.randn(*batch["input_ids"].shape, hidden_size, device=device) if is_training else None
    step: Callable[[], None] = models.make_step(ours.to(device).train(is_training), batch, gradient)

    def run() -> None:
        step()
        if HAS_GPU:
            torch.cuda.synchronize()

    benchmark.extra_info.update(real_tokens=sum(lengths), fill=round(sum(lengths) / batch["input_ids"].numel(), 4))
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=1)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TOKENIZER_CASES])
def test_tokenizer(case: TokenizerCase, benchmark: Any) -> None:
    """bert_fast's side of a tokenizer case: one batch, or its texts one by one."""
    corpus = CORPORA[case.corpus]
    try:
        texts = corpus.read()[: case.batch_size]
    except FileNotFoundError as error:
        pytest.skip(f"the texts are not there: {error.filename}")
    run = contestants.load("bert_fast", corpus.vocabulary)[case.entrants[0].form]
    benchmark.extra_info.update(bytes=sum(len(text.encode()) for text in texts))
    benchmark.pedantic(
        (lambda: [run(text) for text in texts]) if case.form == "one" else lambda: run(texts), rounds=ROUNDS
    )
