"""One kernel case on one device: is it right, does it repeat, and how long does it take beside its contestants.

Nothing here knows a family: `case.py` says what a case is. `docs/benchmarks.md` explains the figures.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem
from benchmarks.kit.clock import Clock, HostClock, Launch, QueueClock, Times
from benchmarks.kit.programs import kernel_digests
from benchmarks.kit.results import ROOT, reason

PROVIDERS = ("bert_fast", "eager", "compiled")
# Several times the largest cache (60 MB of L2 on an H200, 256 MB of Infinity Cache on an MI300): launches take turns
# on copies of the problem until that much has been touched, so that each finds its inputs in memory. Each copy costs
# the time to make and launch it: MAX_ROTATION copies of the smallest shapes that train (4,096 x 768) touch 200 MB.
ROTATION_BYTES, MAX_ROTATION = 512 * 2**20, 16
ROUNDS, MIN_ROUNDS, WARMUP = 20, 5, 3
CASE_SECONDS = 3.0  # for the counted rounds of a case where time is short
# Launching all copies takes the host at most so long. What takes it longer launches many kernels, which leave little of
# each other's inputs in a cache.
TURN_SECONDS = 0.1
Function = Callable[..., Any]


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run; None where it was not measured."""

    copy_gb_s: float | None = None
    matmul_tflop_s: float | None = None


@contextmanager
def launched_kernels() -> Iterator[dict[str, str]]:
    """Yields a dict that takes, for every Triton kernel of bert_fast launched within, its name and digest."""
    launched: dict[str, str] = {}
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield launched
        return
    hashes = kernel_digests()
    run = JITFunction.run

    def recording(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(kernel, "__name__", "")
        if name in hashes:
            launched[name] = hashes[name]
        return run(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", recording):
        yield launched


def check_case(case: KernelCase, device: torch.device) -> dict[str, Any]:
    """Runs a case twice and verifies it; never raises: what went wrong is the result.

    Returns: family, case, ok, error (None or text), and kernels: name -> digest of what was launched. While
    launches are noted, they are Triton's own: only the first run is noted, so that prepared launches are verified.
    """
    kernels: dict[str, str] = {}
    try:
        error = _difference_between_runs(case, device, kernels)
        torch.manual_seed(0)
        case.make(device).verify()
    except AssertionError as failure:
        error = f"wrong: {failure}"
    except Exception as failure:  # whatever stops a case is what there is to say about it
        error = f"{reason(failure, 2000)} ({_place(failure)})"
    return {"family": case.family, "case": case.name, "ok": error is None, "error": error, "kernels": kernels}


def _place(failure: Exception) -> str:
    """The last line of this project that a failure came through."""
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}, line {frames[-1].lineno}" if frames else "elsewhere"


def _difference_between_runs(case: KernelCase, device: torch.device, kernels: dict[str, str]) -> str | None:
    """Runs two problems made from one seed; None if outputs, gradients and changed inputs agree in every bit.

    kernels: takes what the first run launched.
    """
    runs: list[dict[str, Tensor]] = []
    made: list[tuple[Tensor, ...]] = []
    for watch in (launched_kernels, nullcontext):
        torch.manual_seed(0)
        problem = case.make(device)
        made.append(tuple(t.detach().clone() for t in problem.inputs))
        with watch() as launched:
            try:
                runs.append(results_of(problem))
            finally:
                kernels.update(launched or {})
    if not all(map(_same_bits, *made)):
        return "make() draws other inputs from the same seed, so repeatability cannot be tested"
    return difference(*runs)


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> str | None:
    """What differs between the results of two runs; None if nothing does."""
    different = [name for name in first if not _same_bits(first[name], second[name])]
    return f"two runs differ in {', '.join(different)}" if different else None


def results_of(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients; for a step, inputs after two of them (the second sees the state the first has left)."""
    if problem.upstream is None:
        outputs = [problem.fast(*problem.inputs) for _ in range(2)]
        results = {f"input {i}": t for i, t in enumerate(problem.inputs)}
        return results | {f"output {i}": t for i, t in enumerate(outputs) if t is not None}
    output = problem.fast(*problem.inputs)
    assert isinstance(output, Tensor), "a case with an upstream gradient has an output"
    gradients = gradients_of(output, problem.inputs, problem.upstream)
    return {"output": output.detach()} | {f"gradient {i}": g for i, g in enumerate(gradients)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]  # a NaN equals itself
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def compile_eager(eager: Function, backend: str = "inductor") -> Function:
    """torch.compile of a case's eager function for its one shape, with everything compiled before forgotten.

    Backward runs many times on one graph, which must not give its saved buffers away ("donate" them) to the first run:
    some versions of PyTorch then refuse the second.
    """
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    functorch.donated_buffer = False  # type: ignore[attr-defined]
    return torch.compile(eager, dynamic=False, backend=backend)


@dataclass
class Contestant:
    """One function in one mode: a batch of launches, one for each copy of the problem."""

    provider: str
    mode: str
    launches: list[Launch]
    clock: Clock
    peak_bytes: int | None = None
    microseconds: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def take_turn(self, is_counted: bool) -> None:
        microseconds = self.clock.microseconds(self.launches)
        if is_counted:
            self.microseconds.append(microseconds)
            self.host_us.append(self.clock.host_us)

    @property
    def times(self) -> Times:
        return Times(tuple(t / 1e6 for t in self.microseconds))


def time_case(
    case: KernelCase,
    device: torch.device,
    providers: Iterable[str] = PROVIDERS,
    *,
    with_peers: bool = False,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
    ceilings: Ceilings | None = None,
    compile_backend: str = "inductor",
    kernels: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Times one case, which must have been checked; yields a result for each provider and mode.

    rounds, seconds: as `take_turns` has them; results say how many rounds there were.
    kernels: those that the check launched; bert_fast's results then name them, and say that they are verified.

    Forward includes what autograd saves. Backward is `torch.autograd.grad` on graphs built before, so neither forward
    nor accumulation into `.grad` is in it; "fwd_bwd" is both in one launch. Contestants take turns, round after round;
    among them is a plain copy of the same number of bytes. A contestant that fails yields {"provider", "skipped"}.
    """
    ceilings = ceilings or Ceilings()
    named = {"family": case.family, "case": case.name}
    problems = _rotation(case, device)
    contestants: list[Contestant] = []
    names = [*providers, *(problems[0].peers if with_peers else ())]
    for provider in names:
        try:
            functions = _functions(provider, problems, compile_backend)
            contestants += _contestants(provider, problems, functions, device)
        except Exception as failure:  # a contestant that cannot run is reported, the others run on
            yield {**named, "provider": provider, "skipped": reason(failure)}
    for mode, size in problems[0].bytes_moved.items():
        contestants.append(Contestant("copy", mode, copies(size, len(problems), device), make_clock(device)))
    take_turns(contestants, rounds, seconds)
    by_key = {(c.provider, c.mode): c for c in contestants}
    for contestant in contestants:
        if contestant.provider != "copy":
            yield named | _result(contestant, by_key, problems, ceilings, kernels)


def quick_times(problem: Problem, device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """By mode: us, host_us and clock of bert_fast, launched again and again on one problem, whose inputs a cache may
    hold.
    """
    contestants = _contestants("bert_fast", [problem], [problem.fast], device)
    take_turns(contestants, rounds)
    return {
        one.mode: {
            "us": round(one.times.median * 1e6, 1),
            "host_us": round(statistics.median(one.host_us), 1),
            "clock": one.clock.name,
        }
        for one in contestants
    }


def take_turns(contestants: Sequence[Contestant], rounds: int, seconds: float = math.inf) -> None:
    """Round after round, after a few that do not count.

    Where all rounds would take longer than `seconds`, judged by the last one that does not count, there are fewer, but
    at least MIN_ROUNDS of them if so many were asked for. Every contestant takes part in each.
    """
    took = 0.0
    for _ in range(WARMUP):  # in the first ones, clocks find out how long the device must sleep
        start = time.perf_counter()
        for contestant in contestants:
            contestant.take_turn(False)
        took = time.perf_counter() - start
    if rounds * took > seconds:
        rounds = min(rounds, max(MIN_ROUNDS, int(seconds / took)))
    for _ in range(rounds):
        for contestant in contestants:
            contestant.take_turn(True)


def _rotation(case: KernelCase, device: torch.device) -> list[Problem]:
    torch.manual_seed(0)
    first = case.make(device)
    if device.type == "cpu":
        return [first]
    count = math.ceil(ROTATION_BYTES / max(1, min(first.bytes_moved.values())))
    return [first, *(case.make(device) for _ in range(min(count, MAX_ROTATION) - 1))]


def _functions(provider: str, problems: Sequence[Problem], compile_backend: str) -> list[Function]:
    """The provider's function for every copy of the problem."""
    if provider == "bert_fast":
        return [problem.fast for problem in problems]
    if provider == "eager":
        return [problem.eager for problem in problems]
    if provider == "compiled":
        # One compilation serves all copies, but where a function has a state of its own.
        if problems[0].upstream is not None:
            return [compile_eager(problems[0].eager, compile_backend)] * len(problems)
        return [compile_eager(problem.eager, compile_backend) for problem in problems]
    return [problem.peers[provider] for problem in problems]


def _contestants(
    provider: str, problems: Sequence[Problem], functions: Sequence[Function], device: torch.device
) -> list[Contestant]:
    arguments = [problem.arguments_of(provider) for problem in problems]
    forward: list[Launch] = [partial(f, *inputs) for f, (inputs, _) in zip(functions, arguments, strict=True)]
    if "fwd_bwd" in problems[0].bytes_moved:
        forward = [
            partial(_forward_and_backward, launch, *those) for launch, those in zip(forward, arguments, strict=True)
        ]
    is_single = "fwd" not in problems[0].bytes_moved
    first = forward[0]()  # compiles, which may take memory of its own
    if not is_single:
        _backward(first, *arguments[0])()
    del first
    before, start = _reset_peak(device), time.perf_counter()
    first = forward[0]()
    backward: list[Launch] = [] if is_single else [_backward(first, *arguments[0])]
    for run in backward:
        run()
    took = time.perf_counter() - start
    peak = _peak(device, before)
    forward = forward[: max(1, int(TURN_SECONDS / took))]
    if is_single:
        (mode,) = problems[0].bytes_moved
        return [Contestant(provider, mode, forward, make_clock(device), peak)]
    backward += [
        _backward(launch(), *those) for launch, those in zip(forward[1:], arguments[1 : len(forward)], strict=True)
    ]
    return [
        Contestant(provider, "fwd", forward, make_clock(device), peak),
        Contestant(provider, "bwd", backward, make_clock(device), peak),
    ]


def gradients_of(
    output: Any, inputs: tuple[Tensor, ...], upstream: Tensor | tuple[Tensor, ...], **options: bool
) -> tuple[Tensor, ...]:
    """Gradients of the inputs that want one, of an output that is a tensor or several, given as many upstream ones."""
    outputs = (output,) if isinstance(output, Tensor) else output
    given = (upstream,) if isinstance(upstream, Tensor) else upstream
    leaves = [t for t in inputs if t.requires_grad]
    cast = [gradient.to(one.dtype) for one, gradient in zip(outputs, given, strict=True)]
    return torch.autograd.grad(outputs, leaves, cast, **options)


def _backward(output: Any, inputs: tuple[Tensor, ...], upstream: Any) -> Launch:
    assert upstream is not None
    return partial(gradients_of, output, inputs, upstream, retain_graph=True, allow_unused=True)


def _forward_and_backward(forward: Launch, inputs: tuple[Tensor, ...], upstream: Any) -> tuple[Tensor, ...]:
    return gradients_of(forward(), inputs, upstream, allow_unused=True)


def copies(bytes_moved: int, count: int, device: torch.device) -> list[Launch]:
    """Copies that read and write as many bytes in all; random content, since zeros may run faster."""
    pairs = []
    for _ in range(count):
        source = torch.randint(0, 256, (max(1, bytes_moved // 2),), dtype=torch.uint8, device=device)
        pairs.append((torch.empty_like(source), source))
    return [partial(target.copy_, source) for target, source in pairs]


def make_clock(device: torch.device) -> Clock:
    """The device's own clock."""
    return QueueClock() if device.type == "cuda" else HostClock()


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int) -> int | None:
    """Bytes that one forward and backward took at most, beyond inputs."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _result(
    contestant: Contestant,
    by_key: dict[tuple[str, str], Contestant],
    problems: Sequence[Problem],
    ceilings: Ceilings,
    kernels: dict[str, str] | None,
) -> dict[str, Any]:
    mode, times = contestant.mode, contestant.times
    size, flops = problems[0].bytes_moved[mode], problems[0].flops.get(mode)
    gb_s = size / times.median / 1e9
    equal_copy = size / by_key["copy", mode].times.median / 1e9
    result: dict[str, Any] = {
        "provider": contestant.provider,
        "mode": mode,
        **times.microseconds(),
        "host_us": round(Times(tuple(contestant.host_us)).median, 2),
        "bytes": size,
        "gb_s": round(gb_s, 1),
        "equal_copy_gb_s": round(equal_copy, 1),
        "share_of_equal_copy": round(gb_s / equal_copy, 4),
        "copy_ceiling_gb_s": ceilings.copy_gb_s,
        "share_of_copy_ceiling": round(gb_s / ceilings.copy_gb_s, 4) if ceilings.copy_gb_s else None,
        "peak_bytes": contestant.peak_bytes,
        "clock": contestant.clock.name,
        "rounds": len(times.seconds),
        "rotation": len(contestant.launches),
    }
    if contestant.provider == "bert_fast":
        result["peers"] = sorted(problems[0].peers)
        result |= {} if kernels is None else {"verified": True, "kernels": kernels}
    if flops:
        rate = flops / times.median / 1e12
        ceiling = ceilings.matmul_tflop_s
        result |= {"flops": flops, "tflop_s": round(rate, 2), "matmul_ceiling_tflop_s": ceiling}
        result["share_of_matmul_ceiling"] = round(rate / ceiling, 4) if ceiling else None
    ours = by_key.get(("bert_fast", mode))
    if ours is not None and ours is not contestant:
        result["bert_fast_speedup"] = round(ours.times.speedup_over(times), 3)
    return result
