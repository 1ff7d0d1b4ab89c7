"""What `make gpu` runs in its processes, here on the CPU: red cases are not timed, results are complete."""

import dataclasses
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from benchmarks.gpu import parts
from benchmarks.kernels import timing as kernels
from benchmarks.kernels.case import KernelCase, Problem, Use
from benchmarks.kernels.ceilings import ceilings_of
from benchmarks.kit import clock as budget
from benchmarks.kit.programs import digest
from benchmarks.registry import kernel_cases
from tests.benchmarks.conftest import FAMILY, CpuRun
from tests.benchmarks.smoke_family import FAMILY as OTHER_FAMILY

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


def kernel_case(name: str) -> KernelCase:
    """Of a name "family/shape"."""
    family, shape = name.split("/")
    return KernelCase(family, shape, torch.float32, "none", lambda device: None, Use.GPU)


def test_kernels_come_first_then_families_in_turn(cpu_run: CpuRun) -> None:
    launched = {
        "a/4096": "a", "a/16384": "a", "a/16384b": "a", "b/16384": "a", "b/32768": "a b", "c/16384": "c",
        "c/4096": "c", "d/base": "c", "d/large": "d c",
    }  # fmt: skip
    for name, those in launched.items():
        cpu_run.run.recorder.write("verify", case=kernel_case(name).name, kernels=dict.fromkeys(those.split(), "hash"))
    ordered = parts._most_telling_first(parts.Job("time", cpu_run.run), map(kernel_case, launched))
    assert [f"{case.family}/{case.shape}" for case in ordered] == [
        "a/16384", "c/16384", "b/32768", "d/large",  # each launches what none before it does
        "b/16384", "d/base", "a/16384b", "c/4096", "a/4096",
    ]  # fmt: skip


def test_one_process_times_every_family_of_the_run(tmp_path: Path) -> None:
    run = CpuRun(tmp_path, (FAMILY, OTHER_FAMILY))
    for family in (FAMILY, OTHER_FAMILY):
        for case in kernel_cases("small", [family]):
            is_green = case.variant in ("right", "step", "last")
            run.run.recorder.write("verify", family=family, case=case.name, ok=is_green, kernels={})
    assert run.part("time", family="") == 0
    timed = list(dict.fromkeys(line["case"] for line in run.lines("timing")))
    names = {f: f"kernel/{f}/8x16/fp32/" for f in (FAMILY, OTHER_FAMILY)}
    assert timed == [
        names[FAMILY] + "right", names[OTHER_FAMILY] + "right", names[FAMILY] + "step", names[OTHER_FAMILY] + "last"
    ]  # fmt: skip
    left_out = {line["family"] for line in run.lines("skipped") if line["reason"] == "verified red: not timed"}
    assert left_out == {FAMILY, OTHER_FAMILY}


def test_behind_a_case_that_takes_the_device_with_it_the_next_process_times_the_other_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, progress = CpuRun(tmp_path, (FAMILY, OTHER_FAMILY)), tmp_path / "progress.jsonl"
    for family in (FAMILY, OTHER_FAMILY):
        for case in kernel_cases("small", [family]):
            run.run.recorder.write("verify", family=family, case=case.name, ok=case.variant == "right", kernels={})
    usable = iter([False])
    monkeypatch.setattr(parts, "is_usable", lambda device: next(usable, True))

    def leave() -> NoReturn:
        raise SystemExit(3)

    monkeypatch.setattr(parts, "leave", leave)
    with pytest.raises(SystemExit):
        run.part("time", family="", progress=progress)
    assert run.part("time", family="", progress=progress) == 0
    assert list(dict.fromkeys(line["family"] for line in run.lines("timing"))) == [FAMILY, OTHER_FAMILY]
    red = [line["case"] for line in run.lines("skipped") if "red" in line["reason"]]
    assert len(red) == len(set(red)) == 12, "what is left out is recorded once"


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


def test_one_slow_case_does_not_leave_out_all_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    costs = [1.0] * 4 + [40.0] + [1.0] * 100
    done, left_out = 0, []
    for cost in budget.Seconds(60.0).of(costs, lambda case, why: left_out.append(case)):
        now += cost
        done += 1
    assert now == 60.0 and done + len(left_out) == len(costs), "all the time is used, none is overrun"


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


def test_launched_kernels_are_recorded_with_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    ran = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *args, **kwargs: ran.append(kernel.__name__))
    from bert_fast.triton import _column_sums

    kernel = _column_sums._column_sums_kernel
    if not isinstance(kernel, jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1 has replaced the kernels")
    with kernels.launched_kernels() as launched:
        kernel[(1,)](1, 2)
    kernel[(1,)](1, 2)
    assert launched == {"_column_sums_kernel": digest("_column_sums", "_column_sums_kernel")}
    assert ran == ["_column_sums_kernel"] * 2, "a recorded kernel still runs"


@pytest.mark.parametrize(
    ("round_s", "asked", "taken"), [(0.01, 20, 20), (0.15, 20, 20), (0.5, 20, 6), (2.0, 20, 5), (2.0, 3, 3)]
)
def test_a_slow_case_takes_fewer_rounds(
    round_s: float, asked: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, turns = 0.0, 0

    class SlowAtFirst:
        name, host_us = "made up", 0.0

        def microseconds(self, launches: object) -> float:
            nonlocal now, turns
            turns += 1
            now += round_s / 2 + (30.0 if turns == 1 else 0.0)  # it has searched for how long to sleep
            return 1.0

    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now)
    contestants = [kernels.Contestant(name, "fwd", [], SlowAtFirst()) for name in ("bert_fast", "eager")]
    kernels.take_turns(contestants, asked, seconds=3.0)
    assert [len(one.times.seconds) for one in contestants] == [taken, taken]
    kernels.take_turns(contestants, asked)
    assert {len(one.times.seconds) for one in contestants} == {taken + asked}, "without a limit all are taken"


def test_launches_rotate_over_copies_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in kernel_cases("small", [FAMILY]):
        if case.variant in GREEN:
            problems = [case.make(torch.device("cpu")) for _ in range(3)]
            monkeypatch.setattr(kernels, "_rotation", lambda case, device, problems=problems: problems)
            results = list(kernels.time_case(case, torch.device("cpu"), rounds=2, compile_backend="aot_eager"))
            assert {result["rotation"] for result in results} == {3}
            assert {result["provider"] for result in results} == {"bert_fast", "eager", "compiled"}


def test_what_takes_the_host_long_is_launched_on_fewer_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in kernel_cases("small", [FAMILY]) if case.variant == "right")
    problems = [case.make(torch.device("cpu")) for _ in range(3)]
    eager = problems[0].eager

    def slow(*inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)
        result: torch.Tensor = eager(*inputs)
        return result

    problems = [dataclasses.replace(problem, eager=slow) for problem in problems]
    monkeypatch.setattr(kernels, "_rotation", lambda case, device: problems)
    results = list(kernels.time_case(case, torch.device("cpu"), ["bert_fast", "eager"], rounds=2))
    assert {result["rotation"] for result in results if result["provider"] == "eager"} == {1}
    assert {result["rotation"] for result in results if result["provider"] == "bert_fast"} == {3}


@pytest.mark.parametrize(
    ("size", "copies"), [(2**30, 1), (2**29, 1), (2**29 - 1, 2), (32 * 2**20, 16), (25 * 2**20, 16), (1, 16)]
)
def test_small_problems_are_copied_until_no_cache_holds_them_or_there_are_many(size: int, copies: int) -> None:
    def make(device: object) -> Problem:
        return Problem((), None, lambda: None, lambda: None, {"step": size}, lambda: None)

    case = KernelCase(FAMILY, "1x1", torch.float32, "none", make, Use.SMALL)
    assert len(kernels._rotation(case, SimpleNamespace(type="cuda"))) == copies
    assert len(kernels._rotation(case, torch.device("cpu"))) == 1
