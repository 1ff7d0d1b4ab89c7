"""The smoke cases: every kernel is in one, faults show in figures, and all of it launches over the null driver."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.families import attention
from benchmarks.gpu import checks, whole
from benchmarks.gpu.checks import CompiledKernels, SmokeCase, run
from benchmarks.kernels.case import KernelCase, Use
from benchmarks.kit import crashes, programs
from benchmarks.kit.results import read_lines
from benchmarks.registry import family_names, kernel_cases
from bert_fast.devices import assembler
from bert_fast.testing.attention import TABLES, AttentionCase
from bert_fast.testing.compare import assert_close_to_truth, assert_same_values, comparisons
from tests import recorded_graph
from tests.null_driver.server import run_command
from tests.patience import PATIENCE_S
from tools.null_driver import build

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CLEARED = ("TRITON_INTERPRET", "BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH")


def over_null_driver(*command: str, **environment: str) -> str:
    """What a module writes, in a process of its own."""
    if reason := build.missing():
        pytest.skip(reason)
    kept = {name: value for name, value in os.environ.items() if name not in CLEARED}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_kernel_that_ships_is_in_a_case() -> None:
    by_size = json.loads(run_command("tests.benchmarks.case_launches", "smoke", "gpu"))
    for size, by_case in by_size.items():
        launched = {kernel for kernels in by_case.values() for kernel in kernels}
        assert set(programs.kernel_digests()) - launched == set(), f"give the family a case that launches it, of {size}"


@pytest.mark.slow
def test_smoke_over_the_null_driver_by_another_assembler(tmp_path: Path) -> None:
    """One that takes down what it is called with: it makes the kernel, which fits and launches.

    With a cache of its own, so that the kernel is compiled.
    """
    pytest.importorskip("triton")
    own = (assembler((9, 0)) or "").split(" at ")[1]
    calls, other = tmp_path / "calls", tmp_path / "ptxas"
    other.write_text(f"#!/bin/sh\necho \"$@\" >> '{calls}'\n'{own}' \"$@\" && echo another >> /dev/stderr\n")
    other.chmod(0o755)
    said = over_null_driver(
        "benchmarks.gpu", "--parts", "smoke", "--device", "sm_90", "--families", "dropout", "--results", str(tmp_path),
        "--minutes", "10", TRITON_CACHE_DIR=str(tmp_path / "cache"), TRITON_PTXAS_PATH=str(other),
        TRITON_PTXAS_BLACKWELL_PATH=str(other),
    )  # fmt: skip
    assert said.splitlines()[-2:] == ["smoke: 1 green; 1 kernels launched", "nothing is red"]
    assert re.search(r"^_dropout_kernel +1 +\d", said, re.MULTILINE), "what was compiled, in a table"
    assert "--gpu-name=sm_90a" in calls.read_text()
    line, _ = read_lines(tmp_path / "no-gpu-sm-90.jsonl")
    assert line["ptxas"].endswith(f" at {other}") and line["capability"] == "9.0" and f"ptxas {line['ptxas']}" in said
    assert line["outputs"] == [] and "times" not in line and line["gpu"] is None
    assert line["kernels"] == {"_dropout_kernel": programs.digest("dropout", "_dropout_kernel")}
    (compiled,) = line["compiled"]
    assert compiled["kernel"] == "_dropout_kernel" and compiled["compile_s"] > 0 and compiled["registers"] > 16
    assert compiled["spill_bytes"] == 0 and compiled["shared_bytes"] == 0 and compiled["warps"] >= 1


def test_every_family_has_cases_in_bf16_and_where_it_drops_without_and_with() -> None:
    cases = {name: kernel_cases("smoke", [name]) for name in family_names()}
    assert all(cases.values())
    assert all(any(case.dtype == torch.bfloat16 for case in own) for own in cases.values())
    for name in ("attention", "dropout_add_layer_norm", "embedding", "encoder_layer"):
        variants = " ".join(case.variant for case in cases[name])
        assert "p0.0" in variants and "p0.1" in variants


def test_comparisons_are_taken_down_with_places_and_shares() -> None:
    truth = torch.randn(4, 5, dtype=torch.float64)
    plain = truth.float()
    actual = plain.clone()
    actual[1, 2] += 1.0
    actual[3, 0] = float("inf")
    with comparisons() as found:
        assert_close_to_truth("op", "y", actual, plain, truth)
        assert_close_to_truth("op", "y", plain, plain, truth, name="another")
        assert_same_values("op", "mask", actual, plain)
        assert_same_values("op", "same", plain, plain.clone())
    first, second, third, fourth = found
    assert first.first_bad == (1, 2) and first.bad_share == 0.1 and first.not_finite == 1
    assert first.wrong == "op.y: 1 values are not finite" and abs(first.worst - 1.0) < 1e-6
    assert second.output == "another" and second.wrong is None and second.first_bad is None
    assert third.first_bad == (1, 2) and third.bad_share == 0.1
    assert fourth.wrong is None and fourth.worst == 0.0
    with pytest.raises(AssertionError, match=r"op\.mask: 1 values are not finite"):
        assert_same_values("op", "mask", actual, plain)
    with pytest.raises(AssertionError, match=r"op\.y: worst error 1"):
        assert_close_to_truth("op", "y", actual[:2], plain[:2], truth[:2])


def test_dropout_is_held_against_the_cpus_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    family = importlib.import_module("benchmarks.families.dropout")
    dropout = family.ops.dropout
    (case, *_) = kernel_cases("small", ["dropout"])
    checked = run(SmokeCase(case.name, lambda device: checks.check(case, device)), CPU, CompiledKernels())
    assert checked["outcome"] == "green" and {one["output"] for one in checked["outputs"]} == {"y", "dx"}
    monkeypatch.setattr(family.ops, "dropout", lambda *given, site, **named: dropout(*given, site=site + 1, **named))
    checked = run(SmokeCase(case.name, lambda device: checks.check(case, device)), CPU, CompiledKernels())
    assert checked["outcome"] == "red" and "dropout.y: worst error" in checked["error"]


@pytest.mark.parametrize("relative", ["C", "P", "CP"])
def test_attention_with_extras(relative: str) -> None:
    extras = AttentionCase((5, 0, 9), None, 2, 8, 0.1, bias="AQK", relative=relative)
    make = partial(attention.make_with_extras, extras, torch.float32)
    case = KernelCase("attention", "14x2x8", torch.float32, relative, make, Use.SMALL)
    checked = run(SmokeCase(case.name, lambda device: checks.check(case, device)), CPU, CompiledKernels())
    assert checked["outcome"] == "green", checked["error"]
    names = ["out", "dq", "dk", "dv", "dbias", *(f"d{TABLES[letter]}" for letter in relative)]
    assert [one["output"] for one in checked["outputs"]] == names


def whole_case(name: str) -> SmokeCase:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    return next(case for case in whole.whole_cases("small", False) if name in case.name)


def test_a_whole_model_that_differs_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    case, our_model = whole_case("masked_lm"), whole.our_model
    checked = run(case, CPU, CompiledKernels())
    assert checked["outcome"] == "green", checked["error"]

    def spoilt(theirs: Any) -> torch.nn.Module:
        ours = our_model(theirs)
        with torch.no_grad():
            ours.bert.encoder.layer[0].attention.output.dense.bias[3] += 2.0
        return ours

    monkeypatch.setattr(whole, "our_model", spoilt)
    checked = run(case, CPU, CompiledKernels())
    assert checked["outcome"] == "red" and "fast_model.logits: worst error" in checked["error"]
    assert len(checked["outputs"]) == checks.MOST_OUTPUTS


def test_the_same_bits_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    case = whole_case("batch_invariant")
    assert run(case, CPU, CompiledKernels())["outcome"] == "skipped"
    monkeypatch.setattr(whole, "implementation", lambda *given: SimpleNamespace(backend="triton"))
    monkeypatch.setattr(whole, "_num_differing", lambda model, texts: 2)
    checked = run(case, CPU, CompiledKernels())
    assert checked["outcome"] == "red" and "2 of 3 texts have other bits" in checked["error"]


def test_a_graph_is_held_against_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = whole_case("graph")
    assert run(case, CPU, CompiledKernels())["outcome"] == "skipped"
    recorded_graph.install(monkeypatch)
    checked = run(case, CPU, CompiledKernels())
    assert checked["outcome"] == "green", checked["error"]
    assert recorded_graph.RecordedGraph.num_replays == 3
    fill = whole.graphs.TokenBuffers.fill
    first: list[Any] = []

    def stale(self: Any, batch: Any) -> Any:
        first.append(batch)
        return fill(self, first[0])

    monkeypatch.setattr(whole.graphs.TokenBuffers, "fill", stale)
    assert "a replay does not read its batch" in run(case, CPU, CompiledKernels())["error"]


def test_replayed_layers_are_held_against_the_call_without(monkeypatch: pytest.MonkeyPatch) -> None:
    case = whole_case("layers as graphs")
    assert run(case, CPU, CompiledKernels())["outcome"] == "skipped"
    recorded_graph.install(monkeypatch)
    real = whole.graphs.EncoderGraphs.__init__
    monkeypatch.setattr(
        whole.graphs.EncoderGraphs,
        "__init__",
        lambda self, budgets, *, device="cpu": real(self, budgets, device=device),
    )
    checked = run(case, CPU, CompiledKernels())
    assert checked["outcome"] == "green", checked["error"]
    assert recorded_graph.RecordedGraph.num_replays > 0
    replay = recorded_graph.RecordedGraph.replay

    def stale(self: Any) -> None:
        if recorded_graph.RecordedGraph.num_replays == 0:
            replay(self)

    recorded_graph.RecordedGraph.num_replays = 0
    monkeypatch.setattr(recorded_graph.RecordedGraph, "replay", stale)
    assert run(case, CPU, CompiledKernels())["outcome"] == "red"


def test_a_device_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert crashes.is_usable(CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not crashes.is_usable(SimpleNamespace(type="cuda"))
