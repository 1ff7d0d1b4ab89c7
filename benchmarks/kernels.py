"""Kernel families on a GPU: bert_fast's op against stock PyTorch, eager and compiled, with the bytes that must move.

python -m benchmarks.run --only kernel/          on a machine with a CUDA or ROCm device
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_status import source_hash
from bert_fast import ops

__all__ = ["KERNEL_CASES", "KernelCase", "run_kernel_case"]

ROUNDS = 30
FLUSH_BYTES = 256 * 2**20  # several times the largest L2


@dataclass(frozen=True)
class KernelCase:
    """One shape of one family; every case is timed forward and backward."""

    family: str
    num_tokens: int
    hidden_size: int
    dtype: torch.dtype
    dropout_p: float

    @property
    def name(self) -> str:
        """Stable name used in results and on the command line."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kernel/{self.family}/{self.num_tokens}x{self.hidden_size}/{dtype}/p{self.dropout_p}"

    def bytes_moved(self, mode: str) -> int:
        """The floor of docs/kernels/dropout_add_layer_norm.md, without parameters and partial sums."""
        tile = self.num_tokens * self.hidden_size * self.dtype.itemsize
        tensors = 4 if mode == "fwd" or self.dropout_p > 0.0 else 3
        return tensors * tile + (24 if mode == "bwd" else 16) * self.num_tokens


KERNEL_CASES = tuple(
    KernelCase("dropout_add_layer_norm", num_tokens, hidden_size, torch.bfloat16, dropout_p)
    for num_tokens in (4096, 16384, 32768)
    for hidden_size in (768, 1024)
    for dropout_p in (0.0, 0.1)
)

Residual = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _providers(case: KernelCase, device: torch.device) -> dict[str, Residual]:
    tokens = torch.arange(case.num_tokens, dtype=torch.int32, device=device)
    coords = torch.stack((tokens // 512, tokens % 512), dim=1)
    seed = ops.draw_seed(device)

    def fast(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.dropout_add_layer_norm(
            x, residual, weight, bias, x_bias=x_bias, eps=1e-12, dropout_p=case.dropout_p, seed=seed, coords=coords
        )

    def eager(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        h = residual + F.dropout(x + x_bias, case.dropout_p)
        return F.layer_norm(h, (case.hidden_size,), weight, bias, 1e-12)

    return {"bert_fast": fast, "eager": eager, "compiled": torch.compile(eager)}


def run_kernel_case(case: KernelCase, device: torch.device, providers: tuple[str, ...] = ()) -> dict[str, object]:
    """Times one case on `device`; medians with 20 % and 80 % quantiles in microseconds, GB/s, share of copy bandwidth.

    Inputs and upstream gradients are made before; the cache is flushed before every launch; providers take turns.
    """
    shape = case.num_tokens, case.hidden_size
    x, residual = (torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True) for _ in range(2))
    x_bias, weight, bias = (
        torch.randn(case.hidden_size, dtype=case.dtype, device=device, requires_grad=True) for _ in range(3)
    )
    dy = torch.randn(shape, dtype=case.dtype, device=device)
    inputs = (x, residual, x_bias, weight, bias)
    functions = {n: f for n, f in _providers(case, device).items() if not providers or n in providers}
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.int8, device=device)
    outputs: dict[str, Tensor] = {}
    launches: dict[tuple[str, str], Callable[[], object]] = {("copy", "copy"): lambda: dy.clone()}
    for name, function in functions.items():
        launches[name, "fwd"] = lambda name=name, function=function: outputs.__setitem__(name, function(*inputs))
        launches[name, "bwd"] = lambda name=name: torch.autograd.grad(outputs[name], inputs, dy, retain_graph=True)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in launches}
    for round_index in range(ROUNDS + 5):
        for key, launch in launches.items():
            flush.zero_()
            microseconds = _time(launch, device)
            if round_index >= 5:
                times[key].append(microseconds)
    copy_gb_s = 2 * dy.nbytes / statistics.median(times["copy", "copy"]) / 1e3
    result: dict[str, object] = {
        "case": case.name,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "source_hash": source_hash(case.family),
        "copy_gb_s": round(copy_gb_s, 1),
    }
    for (name, mode), values in times.items():
        if name != "copy":
            ordered, median = sorted(values), statistics.median(values)
            gb_s = case.bytes_moved(mode) / median / 1e3
            result[f"{name}_{mode}_us"] = [
                round(t, 2) for t in (median, ordered[len(ordered) // 5], ordered[-(len(ordered) // 5)])
            ]
            result[f"{name}_{mode}_gb_s"] = round(gb_s, 1)
            result[f"{name}_{mode}_share_of_copy"] = round(gb_s / copy_gb_s, 3)
    return result


def _time(launch: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one launch on the device's own clock (the host's where the device is the host)."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) * 1e3
    begin = time.perf_counter()
    launch()
    return (time.perf_counter() - begin) * 1e6
