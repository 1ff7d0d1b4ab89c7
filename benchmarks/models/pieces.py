"""Single pieces on the CPU: dropout masks against PyTorch's dropout, the residual block, the cost of importing."""

import statistics
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks.kit.clock import interleaved
from benchmarks.models.host_cost import one_token

__all__ = ["COMPONENTS"]


def _coords(num_tokens: int) -> torch.Tensor:
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack((tokens // 128, tokens % 128), dim=1)


def dropout(rounds: int) -> dict[str, object]:
    """Counter-based dropout against `torch.nn.functional.dropout`, forward and backward, [4096, 768] fp32."""
    from bert_fast import ops

    x = torch.randn(4096, 768, requires_grad=True)
    dy, coords, seed = torch.randn(4096, 768), _coords(4096), ops.draw_seed(torch.device("cpu"))
    times = interleaved(
        {
            "bert_fast": lambda: ops.dropout(x, 0.1, seed=seed, coords=coords, site=1).backward(dy),
            "torch": lambda: torch.nn.functional.dropout(x, 0.1).backward(dy),
        },
        rounds * 5,
        warmup=3,
    )
    return _pair("dropout/4096x768/forward and backward", times)


def dropout_add_layer_norm(rounds: int) -> dict[str, object]:
    """The fused residual block against dropout + add + layer_norm, forward and backward, [4096, 768] fp32."""
    from bert_fast import ops

    x, residual = (torch.randn(4096, 768, requires_grad=True) for _ in range(2))
    weight, bias = torch.ones(768, requires_grad=True), torch.zeros(768, requires_grad=True)
    dy, coords, seed = torch.randn(4096, 768), _coords(4096), ops.draw_seed(torch.device("cpu"))

    def ours() -> None:
        y = ops.dropout_add_layer_norm(
            x, residual, weight, bias, eps=1e-12, dropout_p=0.1, seed=seed, coords=coords, site=1
        )
        y.backward(dy)

    def composed() -> None:
        functional = torch.nn.functional
        functional.layer_norm(residual + functional.dropout(x, 0.1), (768,), weight, bias, 1e-12).backward(dy)

    return _pair(
        "dropout_add_layer_norm/4096x768/forward and backward",
        interleaved({"bert_fast": ours, "torch": composed}, rounds * 5, 3),
    )


def attention(rounds: int) -> dict[str, object]:
    """Native attention, forward, against PyTorch's flash attention for CPUs (no dropout); 32 x 128, 12 x 64."""
    from bert_fast import ops

    sequences, length, heads, head_dim = 32, 128, 12, 64
    q, k, v = (torch.randn(sequences * length, heads, head_dim) for _ in range(3))
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32) * length
    padded = [t.view(sequences, length, heads, head_dim).transpose(1, 2) for t in (q, k, v)]
    times = interleaved(
        {
            "bert_fast": lambda: ops.attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=length),
            "torch": lambda: torch.nn.functional.scaled_dot_product_attention(*padded),
        },
        rounds * 5,
        warmup=3,
    )
    return _pair("attention/32x128x12x64/forward", times)


def gemm(rounds: int) -> dict[str, object]:
    """The linear layer of the MLP, forward, against `torch.nn.functional.linear`; 940 x 768 x 3072."""
    from bert_fast import ops

    x, weight, bias = torch.randn(940, 768), torch.randn(3072, 768), torch.randn(3072)
    times = interleaved(
        {
            "bert_fast": lambda: ops.linear(x, weight, bias),
            "torch": lambda: torch.nn.functional.linear(x, weight, bias),
        },
        rounds * 5,
        warmup=3,
    )
    return _pair("linear/940x768x3072/forward", times)


def _pair(case: str, times: dict) -> dict[str, object]:
    return {
        "case": case,
        "bert_fast_ms": round(times["bert_fast"].median * 1e3, 3),
        "torch_ms": round(times["torch"].median * 1e3, 3),
        "ratio": round(times["bert_fast"].speedup_over(times["torch"]), 3),
    }


def import_time(rounds: int) -> dict[str, object]:
    """Seconds that `import bert_fast` adds in a process that has torch already."""
    program = "import torch, time; t = time.perf_counter(); import bert_fast; print(time.perf_counter() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(max(rounds, 5))
    ]
    return {"case": "import_time", "median_s": round(statistics.median(seconds), 4)}


COMPONENTS: dict[str, Callable[[int], dict[str, object]]] = {
    "component/attention": attention,
    "component/dropout": dropout,
    "component/linear": gemm,
    "component/dropout_add_layer_norm": dropout_add_layer_norm,
    "component/import_time": import_time,
    "component/one_token/inference": one_token,
    "component/one_token/training": lambda rounds: one_token(rounds, "training"),
}
