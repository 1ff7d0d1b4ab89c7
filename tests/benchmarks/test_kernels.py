"""The GPU benchmark's code path, run on the CPU: what it would store must be complete and count the right bytes."""

import torch

from benchmarks import kernels
from benchmarks.gpu_status import source_hash


def test_a_case_yields_times_bytes_and_the_source_hash(monkeypatch):
    monkeypatch.setattr(kernels, "ROUNDS", 5)
    case = kernels.KernelCase("dropout_add_layer_norm", 32, 64, torch.float32, 0.1)
    result = kernels.run_kernel_case(case, torch.device("cpu"), providers=("bert_fast", "eager"))
    assert result["source_hash"] == source_hash("dropout_add_layer_norm")
    assert result["gpu"] is None, "a result without a GPU must not pay what is owed to one"
    for provider in ("bert_fast", "eager"):
        for mode in ("fwd", "bwd"):
            median, low, high = result[f"{provider}_{mode}_us"]
            assert 0 < low <= median <= high
    assert case.bytes_moved("fwd") == 4 * 32 * 64 * 4 + 16 * 32
