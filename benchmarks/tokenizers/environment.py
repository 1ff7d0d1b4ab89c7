"""What a process of a measurement is given: threads and one CPU; and what a figure of it depends on.

Importing this module imports no torch.
"""

import os
from importlib import metadata
from typing import Any

from benchmarks.kit.record import host_environment


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables that keep a contestant's thread pool to so many threads."""
    names = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads)) | {"TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false"}


def pin_to_one_cpu() -> None:
    """Keeps this process to one CPU, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def tokenizer_environment() -> dict[str, Any]:
    """Fields of every stored line."""
    return host_environment() | {
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "numpy": metadata.version("numpy"),
        "bert_fast": metadata.version("bert_fast"),
    }
