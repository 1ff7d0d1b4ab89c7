"""THE list of embedding benchmarks on a CPU, as jobs of `benchmarks.run`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.embedding.batch_memory import SIZES, run_memory
from benchmarks.embedding.contrastive import run_contrastive

# Name -> function of the number of rounds.
EMBEDDING_JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    "contrastive/minilm/32x8/1": partial(run_contrastive, 32, 8, 1),
    **{f"batch_memory/{shape}": lambda rounds, shape=shape: run_memory(shape) for shape in SIZES},
}
