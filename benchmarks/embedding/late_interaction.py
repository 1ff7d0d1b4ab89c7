"""In-batch scores of late interaction on a CPU, forward and backward: ours beside sentence-transformers'.

`losses.colbert_scores` and `colbert_scores` of `sentence_transformers.multi_vector_encoder.scoring`, on the same padded
unit vectors in fp32: queries of 32 tokens, as many documents of 100 to 300, H = 128. They take turns, by CPU time
of the process; scores and gradients must be the same, or there is no result. Memory is the peak of a process
of its own beyond
what it held before.

    python -m benchmarks.embedding.late_interaction SIDE QUERIES     one measurement of memory, as JSON
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.embedding.batch_memory import peak
from benchmarks.kit.clock import interleaved
from benchmarks.kit.study import in_a_process

_QUERY_TOKENS, _DOCUMENT_TOKENS, _VECTOR = 32, (100, 300), 128
_AGREE = 1e-4  # of sums of 32 maxima, and of gradients that add up as many as Q terms near 1


def _sides() -> dict[str, Callable[..., Tensor]]:
    from sentence_transformers.multi_vector_encoder.scoring import colbert_scores

    from bert_fast import losses

    return {"ours": losses.colbert_scores, "theirs": colbert_scores}


def _problem(batch_size: int) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Queries [Q, 32, H], documents [Q, 1, S, H], their masks, and the gradient of scores."""
    torch.manual_seed(0)
    counts = torch.randint(_DOCUMENT_TOKENS[0], _DOCUMENT_TOKENS[1] + 1, (batch_size, 1, 1))
    shapes = (batch_size, _QUERY_TOKENS, _VECTOR), (batch_size, 1, int(counts.max()), _VECTOR)
    queries, documents = (
        torch.nn.functional.normalize(torch.randn(shape), dim=-1).requires_grad_() for shape in shapes
    )
    masks = {
        "queries_mask": torch.ones(shapes[0][:2], dtype=torch.bool),
        "documents_mask": torch.arange(shapes[1][2]) < counts,
    }
    return queries, documents, masks, torch.randn(batch_size, batch_size)


def _step(scores_of: Callable[..., Tensor], problem: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Scores and gradients."""
    queries, documents, masks, upstream = problem
    scores = scores_of(queries, documents, **masks)
    return scores.detach(), *torch.autograd.grad(scores, (queries, documents), upstream)


def run_late_interaction(batch_size: int, rounds: int) -> dict[str, Any]:
    """Times so many queries with as many documents, and measures memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sides, problem = _sides(), _problem(batch_size)
        steps = {name: lambda side=side: _step(side, problem) for name, side in sides.items()}
        found = [step() for step in steps.values()]
        difference = max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
        if not difference <= _AGREE:
            raise RuntimeError(f"late_interaction: results differ by {difference}: nothing to time")
        del found
        times = interleaved(steps, rounds, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    memory = {
        f"{name}_bytes": in_a_process("embedding.late_interaction", name, str(batch_size), threads=1)["bytes"]
        for name in sides
    }
    return {
        "case": f"late_interaction/{batch_size}",
        "queries": batch_size,
        "fill": round(float(problem[2]["documents_mask"].float().mean()), 4),
        **{f"{name}_cpu_s": round(taken.median, 4) for name, taken in times.items()},
        "ratio": round(times["ours"].speedup_over(times["theirs"]), 3),
        **memory,
        **{f"{name}_all_cpu_s": [round(s, 4) for s in taken.seconds] for name, taken in times.items()},
    }


def measure(side: str, batch_size: int) -> int:
    """Bytes that a step needs beyond one of a single query; of this process, once."""
    torch.set_num_threads(1)
    scores_of, problem = _sides()[side], _problem(batch_size)
    _step(scores_of, _problem(1))
    before = peak()
    _step(scores_of, problem)
    return peak() - before


if __name__ == "__main__":
    print(json.dumps({"bytes": measure(sys.argv[1], int(sys.argv[2]))}))
