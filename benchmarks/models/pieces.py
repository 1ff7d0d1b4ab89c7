"""Single pieces on the CPU: ops beside PyTorch's, what a layer keeps for backward, and the cost of importing."""

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.kit.bert import BY_NAME, VOCAB_SIZE
from benchmarks.kit.clock import interleaved
from benchmarks.kit.saved_bytes import saved_bytes
from benchmarks.models.forward_backward import make_models
from bert_fast import ops

Run = Callable[[], object]


def _coords(num_tokens: int) -> torch.Tensor:
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack((tokens // 128, tokens % 128), dim=1)


def dropout() -> tuple[Run, Run]:
    """Counter-based dropout against `torch.nn.functional.dropout`, forward and backward, [4096, 768] fp32."""
    x = torch.randn(4096, 768, requires_grad=True)
    dy, coords, seed = torch.randn(4096, 768), _coords(4096), ops.draw_seed(torch.device("cpu"))
    return (
        lambda: ops.dropout(x, 0.1, seed=seed, coords=coords, site=1).backward(dy),
        lambda: F.dropout(x, 0.1).backward(dy),
    )


def dropout_add_layer_norm() -> tuple[Run, Run]:
    """The fused residual block against dropout + add + layer_norm, forward and backward, [4096, 768] fp32."""
    x, residual = (torch.randn(4096, 768, requires_grad=True) for _ in range(2))
    weight, bias = torch.ones(768, requires_grad=True), torch.zeros(768, requires_grad=True)
    dy, coords, seed = torch.randn(4096, 768), _coords(4096), ops.draw_seed(torch.device("cpu"))
    drop = dict(dropout_p=0.1, seed=seed, coords=coords, site=1)
    return (
        lambda: ops.dropout_add_layer_norm(x, residual, weight, bias, eps=1e-12, **drop).backward(dy),
        lambda: F.layer_norm(residual + F.dropout(x, 0.1), (768,), weight, bias, 1e-12).backward(dy),
    )


def attention() -> tuple[Run, Run]:
    """Native attention, forward, against PyTorch's flash attention for CPUs (no dropout); 32 x 128, 12 x 64."""
    sequences, length, heads, head_dim = 32, 128, 12, 64
    q, k, v = (torch.randn(sequences * length, heads, head_dim) for _ in range(3))
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32) * length
    padded = [t.view(sequences, length, heads, head_dim).transpose(1, 2) for t in (q, k, v)]
    return (
        lambda: ops.attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=length),
        lambda: F.scaled_dot_product_attention(*padded),
    )


# Tokens, inner dimension and columns: one text and many, the MLP's two products of MiniLM and BERT-base.
LINEAR = ((31, 384, 1536), (31, 3072, 768), (128, 768, 3072), (1024, 384, 1536), (940, 768, 3072), (1024, 3072, 768))


def linear(tokens: int, inner: int, columns: int) -> tuple[Run, Run]:
    """A linear layer, forward, against `torch.nn.functional.linear`."""
    inputs = torch.randn(tokens, inner), torch.randn(columns, inner), torch.randn(columns)
    return lambda: ops.linear(*inputs), lambda: F.linear(*inputs)


def _beside_torch(case: str, make: Callable[[], tuple[Run, Run]], rounds: int) -> dict[str, object]:
    ours, theirs = make()
    times = interleaved({"bert_fast": ours, "torch": theirs}, rounds * 5, warmup=3)
    milliseconds = {f"{name}_ms": round(time.median * 1e3, 3) for name, time in times.items()}
    return {"case": case, **milliseconds, "ratio": round(times["bert_fast"].speedup_over(times["torch"]), 3)}


def import_time(rounds: int) -> dict[str, object]:
    """Seconds that `import bert_fast` adds in a process that has torch already."""
    program = "import torch, time; t = time.perf_counter(); import bert_fast; print(time.perf_counter() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(max(rounds, 5))
    ]
    return {"case": "import_time", "median_s": round(statistics.median(seconds), 4)}


def saved_bytes_per_layer(shape: str = "base", batch_size: int = 8, length: int = 512) -> dict[str, object]:
    """Bytes that one encoder layer keeps for backward at dropout 0.1, ours and Hugging Face's: what one more adds.

    On the CPU Hugging Face's eager and sdpa numbers agree: PyTorch's fused CPU attention takes no dropout, so sdpa is
    composed of the same products. PyTorch's CPU dropout keeps masks in fp32, where CUDA keeps a byte an element:
    `transformers_eager_byte_masks` is what eager would keep with such masks, the fairer number for GPUs.
    """
    size, input_ids = BY_NAME[shape], torch.randint(1000, VOCAB_SIZE, (batch_size, length))

    def kept(model: Any) -> int:
        return saved_bytes(model.train(), lambda: model(input_ids=input_ids).last_hidden_state)

    counts: dict[str, int] = dict.fromkeys(("bert_fast", "transformers_eager", "transformers_sdpa"), 0)
    for num_layers, sign in ((2, 1), (1, -1)):
        ours, theirs = make_models(shape, 0.1, num_layers)
        counts["bert_fast"] += sign * kept(ours)
        for attention in ("eager", "sdpa"):
            theirs.config._attn_implementation = attention
            counts[f"transformers_{attention}"] += sign * kept(theirs)
    num_dropped = batch_size * length * (2 * size.hidden + size.heads * length)  # elements, a layer
    counts["transformers_eager_byte_masks"] = counts["transformers_eager"] - 3 * num_dropped
    shares = {
        f"share_of_{name}": round(counts["bert_fast"] / counts[f"transformers_{name}"], 4)
        for name in ("eager", "eager_byte_masks", "sdpa")
    }
    return {"case": f"saved_bytes_per_layer/{shape}/B{batch_size}/S{length}", **counts, **shares}


# Name -> function of the number of rounds.
PIECES: dict[str, Callable[[int], dict[str, object]]] = {
    "saved_bytes_per_layer": lambda rounds: saved_bytes_per_layer(),
    "component/attention": partial(_beside_torch, "attention/32x128x12x64/forward", attention),
    "component/dropout": partial(_beside_torch, "dropout/4096x768/forward and backward", dropout),
    "component/dropout_add_layer_norm": partial(
        _beside_torch, "dropout_add_layer_norm/4096x768/forward and backward", dropout_add_layer_norm
    ),
    "component/import_time": import_time,
} | {
    f"component/linear/{t}x{k}x{n}": partial(_beside_torch, f"linear/{t}x{k}x{n}/forward", partial(linear, t, k, n))
    for t, k, n in LINEAR
}
