"""The figures of a case: contestants in turn, wall time, medians, beside what the machine's products reach."""

import time
from typing import Any

import torch

from benchmarks.kit.bert import Size
from benchmarks.kit.clock import interleaved
from benchmarks.serving.cases import Case
from benchmarks.serving.contestants import Run, check_close

PAUSE = 0.01  # seconds in which worker threads of the contestant before fall asleep
PRODUCT = 1024  # rows and columns of the library's product, of which the fastest round counts as the machine's peak


def measure(runs: dict[str, Run], case: Case, size: Size, rounds: int) -> dict[str, Any]:
    """The figures of a case. Raises RuntimeError where hidden states do not agree."""
    masks = [batch["attention_mask"].bool() for batch in case.padded()]
    expected = torch.cat([states[mask] for states, mask in zip(runs["transformers"](), masks, strict=True)])
    for name, run in runs.items():
        made = run()
        kept = torch.cat(made if made[0].dim() == 2 else [one[mask] for one, mask in zip(made, masks, strict=True)])
        check_close(name, float((kept - expected).abs().max()))

    left, right = torch.randn(2, PRODUCT, PRODUCT)
    product = "torch.mm"
    times = interleaved({**runs, product: lambda: left @ right}, rounds, warmup=2, clock=_Paused())
    peak = 2e-9 * PRODUCT**3 / min(times.pop(product).seconds)
    ours = min((times[name] for name in runs if name.startswith("bert_fast")), key=lambda one: one.median)
    return {
        "entrants": {
            name: {"ms": round(one.median * 1e3, 3), "bert_fast_ratio": round(ours.speedup_over(one), 3)}
            for name, one in times.items()
        },
        "texts": len(case.lengths),
        "tokens": sum(case.lengths),
        "fill": round(case.fill, 3),
        "gflop": round(case.gflop(size), 3),
        "peak_gflop_s": round(peak, 1),
        "share_of_peak": round(case.gflop(size) / ours.median / peak, 3),
        "rounds": rounds,
    }


class _Paused:
    """Wall time, without a pause before each contestant."""

    def __init__(self) -> None:
        self._starts = True

    def __call__(self) -> float:
        if self._starts:
            time.sleep(PAUSE)
        self._starts = not self._starts
        return time.perf_counter()
