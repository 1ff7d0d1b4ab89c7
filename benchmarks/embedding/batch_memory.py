"""Memory of a contrastive step of a large batch of short texts: how it grows with the batch.

`losses.cached_loss` with `losses.in_batch_negatives` on pairs of texts of 8 tokens, 256 pairs at a time, dropout
0.1: peak memory of a process of its own, beyond what it held after a step of 256 pairs. A whole matrix of scores would
be 4 * B^2 bytes. A line through the last two sizes says what 65,536 pairs take.

    python -m benchmarks.embedding.batch_memory SHAPE PAIRS     one measurement, as JSON
"""

import json
import resource
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.kit.study import in_a_process

PART = 256
TOKENS = 8
LARGE = 65536
SIZES = {"tiny": (1024, 2048, 4096, 8192), "minilm": (2048, 8192)}


def measure(shape: str, num_pairs: int) -> int:
    """Bytes that a step of so many pairs needs beyond one of `PART` pairs; of this process, once."""
    import torch

    from benchmarks.kit.bert import BY_NAME
    from bert_fast import BertConfig, BertForTextEmbedding, losses

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertForTextEmbedding(BY_NAME[shape].config(BertConfig, vocab_size=1000)).train()
    ids = torch.randint(5, 1000, (num_pairs, 2 * TOKENS))
    cu_seqlens = torch.arange(2 * PART + 1, dtype=torch.int32) * TOKENS

    def encode(part: torch.Tensor) -> torch.Tensor:
        made = model(input_ids=part.flatten(), cu_seqlens=cu_seqlens[: 2 * len(part) + 1], max_seqlen=TOKENS)
        return made.embeddings.unflatten(0, (-1, 2))

    def step(count: int) -> None:
        parts = ids[:count].split(PART)
        losses.cached_loss(encode, parts, lambda made: losses.in_batch_negatives(made[:, 0], made[:, 1])).backward()

    step(PART)
    before = peak()
    step(num_pairs)
    return peak() - before


def peak() -> int:
    """The most bytes of this program so far.

    What `getrusage` says on Linux is never less than that of the process which started it.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_memory(shape: str, sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """Peaks of all sizes, and what a line says of `LARGE` pairs beside the bytes of a whole matrix of scores."""
    sizes = sizes or SIZES[shape]
    peaks = [in_a_process("embedding.batch_memory", shape, str(size), threads=1)["bytes"] for size in sizes]
    return {"case": f"batch_memory/{shape}", "pairs": list(sizes), "bytes": peaks, **extrapolated(sizes, peaks)}


def extrapolated(sizes: Sequence[int], peaks: Sequence[int]) -> dict[str, Any]:
    """Of the last two sizes: bytes a pair, and bytes of `LARGE` pairs beside those of their matrix of scores."""
    slope = (peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2])
    return {
        "bytes_a_pair": round(slope, 1),
        "large_pairs": LARGE,
        "large_bytes": round(peaks[-1] + slope * (LARGE - sizes[-1])),
        "large_matrix_bytes": 4 * LARGE**2,
    }


if __name__ == "__main__":
    print(json.dumps({"bytes": measure(sys.argv[1], int(sys.argv[2]))}))
