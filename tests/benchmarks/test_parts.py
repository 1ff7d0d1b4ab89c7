"""What `make gpu` runs in its processes, here on the CPU: red cases are not timed, results are complete."""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.status import source_hash
from benchmarks.kernels import timing as kernels
from benchmarks.kernels.case import KernelCase, Problem
from benchmarks.kernels.ceilings import ceilings_of
from benchmarks.kit import clock as budget
from benchmarks.models import forward_backward as models
from benchmarks.registry import kernel_cases
from tests.benchmarks.conftest import FAMILY, CpuRun

GREEN = {"right", "peers", "step"}
TIMING_FIELDS = {
    "run", "gpu", "kind", "time", "family", "case", "provider", "mode", "us", "us_p20", "us_p80", "host_us", "bytes",
    "gb_s", "equal_copy_gb_s", "share_of_equal_copy", "copy_ceiling_gb_s", "share_of_copy_ceiling", "peak_bytes",
    "clock", "rounds", "rotation",
}  # fmt: skip


def test_verify_tells_right_from_wrong(cpu_run: CpuRun) -> None:
    assert cpu_run.part("verify") == 1, "a red case fails the part"
    found = cpu_run.by_variant("verify")
    assert {variant for variant, line in found.items() if line["ok"]} == GREEN
    assert found["wrong"]["error"] == "wrong: worst error 1.0, allowed 0.1"
    assert found["crashing"]["error"].startswith("RuntimeError: the device is gone (tests/benchmarks/fake_family.py, ")
    assert found["unrepeatable"]["error"] == "two runs differ in output"
    assert "other inputs from the same seed" in found["unseeded"]["error"]
    assert all(line["family"] == FAMILY for line in found.values())


def test_only_green_cases_are_timed(cpu_run: CpuRun) -> None:
    cpu_run.part("verify")
    assert cpu_run.part("time") == 0
    assert set(cpu_run.by_variant("timing")) == GREEN
    left_out = {line["case"].rsplit("/", 1)[1]: line["reason"] for line in cpu_run.lines("skipped")}
    assert left_out["wrong"] == "verified red: not timed"


def test_nothing_is_timed_that_this_run_has_not_verified(cpu_run: CpuRun) -> None:
    assert cpu_run.part("time") == 0
    assert not cpu_run.lines("timing")
    assert {line["reason"] for line in cpu_run.lines("skipped")} == {"not verified in this run: not timed"}


def test_a_case_too_large_for_the_device_does_not_end_the_part(
    cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_run.part("verify")
    time_case = kernels.time_case

    def out_of_memory(case, *arguments, **options):
        if case.variant == "right":
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return time_case(case, *arguments, **options)

    monkeypatch.setattr(kernels, "time_case", out_of_memory)
    assert cpu_run.part("time") == 0
    assert set(cpu_run.by_variant("timing")) == GREEN - {"right"}
    reasons = {line["reason"] for line in cpu_run.lines("skipped") if line["case"].endswith("right")}
    assert "OutOfMemoryError: tried to allocate 80 GiB" in reasons


@pytest.mark.slow
def test_a_whole_run_has_every_field(cpu_run: CpuRun) -> None:
    for part in ("ceilings", "verify", "compile", "time", "peers"):
        cpu_run.part(part)
    timings = cpu_run.lines("timing")
    for line in timings:
        assert set(line) >= TIMING_FIELDS
        assert 0 < line["us_p20"] <= line["us"] <= line["us_p80"]
        assert line["gpu"] is None, "a result without a GPU must not pay what is owed to one"
        assert (line["provider"] == "bert_fast") == ("verified" in line) == ("kernels" in line)
        assert math.isclose(line["gb_s"], line["bytes"] / line["us"] / 1e3, abs_tol=0.1 + line["gb_s"])
    keys = {(line["case"].rsplit("/", 1)[1], line["mode"], line["provider"]) for line in timings}
    assert keys == {
        *((variant, mode, provider) for variant in ("right", "peers") for mode in ("fwd", "bwd")
          for provider in ("bert_fast", "eager", "compiled")),
        *(("step", "step", provider) for provider in ("bert_fast", "eager", "compiled")),
        *(("peers", mode, "liger") for mode in ("fwd", "bwd")),
    }  # fmt: skip
    assert all(line["matmul_ceiling_tflop_s"] is not None for line in timings if "flops" in line)
    assert [(s["provider"], s["reason"]) for s in cpu_run.lines("skipped") if s["part"] == "peers"] == [
        ("apex", "ImportError: half an installation")
    ]
    ceilings = ceilings_of(cpu_run.lines("ceiling"))
    assert ceilings.copy_gb_s is not None and ceilings.matmul_tflop_s is not None
    assert {line["copy_ceiling_gb_s"] for line in timings} == {ceilings.copy_gb_s}


@pytest.mark.slow
def test_whole_models_are_timed_where_their_texts_are_there(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    run_case = models.run_case

    def without_texts(case, *arguments, **options):
        if case.mode == "inference":
            raise FileNotFoundError("single_books.json")
        return run_case(case, *arguments, **options)

    monkeypatch.setattr(models, "run_case", without_texts)
    assert cpu_run.part("models") == 0
    (line,) = cpu_run.lines("model")
    assert line["case"] == "minilm/full@128/random/training"
    assert line["ratio"] > 0 and line["real_tokens"] == 128
    (left_out,) = cpu_run.lines("skipped")
    assert left_out["reason"] == "FileNotFoundError: single_books.json"


def test_a_part_without_time_says_what_it_left_out(cpu_run: CpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # a case takes two seconds
    monkeypatch.setattr(budget.time, "monotonic", lambda: float(next(clock)))
    seconds = budget.Seconds(5.0)
    left_out: list[tuple[str, str]] = []
    cases = kernel_cases("small", [FAMILY])
    done = [case.variant for case in seconds.of(cases, lambda case, why: left_out.append((case.variant, why)))]
    assert done == [case.variant for case in cases[: len(done)]] and 1 <= len(done) < len(cases)
    assert [variant for variant, _ in left_out] == [case.variant for case in cases[len(done) :]]
    assert {why for _, why in left_out} == {"no time left in this part"}


def test_backward_leaves_no_gradients_and_runs_on_a_graph_built_before() -> None:
    case = next(case for case in kernel_cases("small", [FAMILY]) if case.variant == "right")
    problem = case.make(torch.device("cpu"))
    calls = []

    def counted(*inputs):
        calls.append(inputs)
        return problem.fast(*inputs)

    contestants = kernels._contestants("bert_fast", [problem], [counted], torch.device("cpu"))
    assert [c.mode for c in contestants] == ["fwd", "bwd"]
    before = len(calls)
    for _ in range(3):
        contestants[1].take_turn(True)
    assert len(calls) == before, "backward must not run forward again"
    assert all(t.grad is None for t in problem.inputs)


def test_launched_kernels_are_recorded_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    ran = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *args, **kwargs: ran.append(kernel.__name__))
    from bert_fast.kernels import _column_sums

    kernel = _column_sums._column_sums_kernel
    if not isinstance(kernel, jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1 has replaced the kernels")
    with kernels.launched_kernels() as launched:
        kernel[(1,)](1, 2)
    kernel[(1,)](1, 2)
    assert launched == {"_column_sums_kernel": source_hash("_column_sums")}
    assert ran == ["_column_sums_kernel"] * 2, "a recorded kernel still runs"


def test_launches_rotate_over_copies_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in kernel_cases("small", [FAMILY]):
        if case.variant in GREEN:
            problems = [case.make(torch.device("cpu")) for _ in range(3)]
            monkeypatch.setattr(kernels, "_rotation", lambda case, device, problems=problems: problems)
            results = list(kernels.time_case(case, torch.device("cpu"), rounds=2, compile_backend="aot_eager"))
            assert {result["rotation"] for result in results} == {3}
            assert {result["provider"] for result in results} == {"bert_fast", "eager", "compiled"}


@pytest.mark.parametrize(("size", "copies"), [(2**30, 1), (2**29, 1), (2**29 - 1, 2), (25 * 2**20, 21), (1, 64)])
def test_small_problems_are_copied_until_no_cache_holds_them(size: int, copies: int) -> None:
    def make(device: object) -> Problem:
        return Problem((), None, lambda: None, lambda: None, {"step": size}, lambda: None)

    case = KernelCase(FAMILY, "1x1", torch.float32, "none", make)
    assert len(kernels._rotation(case, SimpleNamespace(type="cuda"))) == copies
    assert len(kernels._rotation(case, torch.device("cpu"))) == 1
