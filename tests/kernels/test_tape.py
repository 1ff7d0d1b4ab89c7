"""Tapes: replayed calls have the bits of calls that run as they stand, and what cannot be replayed is not."""

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import backend
from bert_fast.storage import join_memory, separate_memory
from tests.kernels.test_encoder_layer import ALL, arguments, upstream

pytestmark = pytest.mark.interpreter
ELSEWHERE = torch.ones(3)


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second.

    The second call of a kind is noted, the third one replayed.
    """
    from bert_fast.kernels import _tape

    monkeypatch.setattr(_tape, "_SIGHTS", 1)
    return _tape


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    return backend.resolve("encoder_layer", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def tapes_of(taped: Any) -> list[Any]:
    return [one for one in taped._tapes.values() if type(one) not in (int, type(None))]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if ours is None or theirs is None:
        return ours is theirs
    alike = ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and ours.shape == theirs.shape
    return alike and torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("of_parameters", [None, torch.float32], ids=["of one dtype", "fp32 parameters"])
@pytest.mark.parametrize("rows", [False, True], ids=["all", "rows"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_layers_are_replayed_bit_for_bit(kernels, of_parameters, rows, dropout_p):  # type: ignore[no-untyped-def]
    for taped in (kernels._forward, kernels._backward):
        taped._tapes.clear()
    for call in range(4):
        torch.manual_seed(call)
        a = arguments(torch.float16, rows=rows, dropout_p=dropout_p, of_parameters=of_parameters)
        a = a._replace(probabilities_site=5 * call, attention_site=5 * call + 1, site=7 * call + 2)
        a = a._replace(seed=torch.tensor([call]))
        y, *saved = kernels.encoder_layer_fwd(a)
        dy = upstream(a) * (call + 1)
        made = kernels.encoder_layer_bwd(a, dy, y, *saved, ALL)
        assert same((y, *saved), kernels._OPS.forward(a)), call
        assert same(made, kernels._OPS.backward(a, dy, y, *saved, wants=ALL)), call
    assert len(tapes_of(kernels._forward)) == len(tapes_of(kernels._backward)) == 1


def test_other_calls_have_tapes_of_their_own(kernels):  # type: ignore[no-untyped-def]
    kernels._forward._tapes.clear()
    a = arguments(torch.float32)
    others = {
        "as it is": a,
        "p": a._replace(dropout_p=0.5),
        "eps": a._replace(eps=1e-5),
        "activation": a._replace(hidden_act="relu"),
        "not kept": a._replace(keeps=False),
        "saves": a._replace(saves="input"),
        "causal": a._replace(causal=True),
        "no biases": a._replace(query_bias=None, key_bias=None, value_bias=None),
        "fewer tokens": a._replace(
            x=a.x[:7], coords_q=a.coords_q[:7], coords_k=a.coords_k[:7], cu_seqlens_q=a.cu_seqlens_q[:3],
            cu_seqlens_k=a.cu_seqlens_k[:3],
        ),
        "strides": a._replace(x=a.x.t().contiguous().t()),
        "not aligned": a._replace(x=torch.cat([a.x.flatten(), a.x[0, :1]])[1:].view(a.x.shape)),
        "another tensor of the same offsets": a._replace(cu_seqlens_k=a.cu_seqlens_k.clone()),
        "half precision": a._replace(x=a.x.half()),
    }  # fmt: skip
    expected = {name: kernels._OPS.forward(other) for name, other in others.items()}
    for number, (name, other) in enumerate(others.items(), 1):
        for _ in range(3):
            assert same(kernels.encoder_layer_fwd(other), expected[name]), name
        assert len(tapes_of(kernels._forward)) == number, name
    for name, other in others.items():
        assert same(kernels.encoder_layer_fwd(other), expected[name]), name


def test_parameters_in_one_block_are_read_where_they_are(kernels):  # type: ignore[no-untyped-def]
    kernels._forward._tapes.clear()
    for call in range(4):
        a = arguments(torch.float32)
        weights, biases = ([torch.nn.Parameter(t) for t in a[first:7:2]] for first in (1, 2))
        join_memory(*weights)
        join_memory(*biases)
        for place, parameter in zip((1, 3, 5, 2, 4, 6), (*weights, *biases), strict=True):
            a = a._replace(**{a._fields[place]: parameter})
        with torch.no_grad():
            assert same(kernels.encoder_layer_fwd(a), kernels._OPS.forward(a)), call
            weights[0].add_(1.0)
            assert same(kernels.encoder_layer_fwd(a), kernels._OPS.forward(a)), call
    assert len(tapes_of(kernels._forward)) == 1


def test_parameters_may_change_between_calls(kernels):  # type: ignore[no-untyped-def]
    def look(what: str) -> None:
        with torch.no_grad():
            assert same(kernels.encoder_layer_fwd(a), kernels._OPS.forward(a)), what

    kernels._forward._tapes.clear()
    a = arguments(torch.float32)
    parameters = [nn.Parameter(one) for one in a[1:17]]
    a = a._replace(**dict(zip(a._fields[1:17], parameters, strict=True)))
    changes = {
        "nothing": lambda p: None,
        "moved": lambda p: setattr(p, "data", p.data.clone()),
        "other strides": lambda p: setattr(p, "data", torch.empty(p.shape[::-1]).t().copy_(p.data)),
        "an odd address": lambda p: setattr(p, "data", torch.empty(p.numel() + 1)[1:].view_as(p).copy_(p.data)),
        "other values": lambda p: p.data.mul_(0.5),
    }
    for name, change in changes.items():
        for place in (0, 6, 10):
            change(parameters[place])
            for _ in range(3):
                look(f"{name}, {place}")
    join_memory(*parameters[0:6:2])
    for _ in range(3):
        look("joined")
    separate_memory(*parameters[0:6:2])
    for _ in range(3):
        look("apart")


def test_which_argument_is_missing_tells_calls_apart(tape):  # type: ignore[no-untyped-def]
    def function(x: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
        return (x + a if b is None else x - b,)

    taped, x, other = tape.Taped(function), torch.randn(3), torch.randn(3)
    for _ in range(4):
        for call in ((x, other, None), (x, None, other)):
            assert same(taped(call), function(*call))


def test_a_lasting_tensor_may_be_an_argument_beside(tape):  # type: ignore[no-untyped-def]
    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (x * w - v,)

    taped = tape.Taped(function, lasting=slice(1, 3))
    w, v = torch.randn(3), torch.randn(3)
    for x in (torch.randn(3), w, v, torch.randn(3), w) * 4:
        assert same(taped((x, w, v)), function(x, w, v))
        assert same(taped((x, w, w)), function(x, w, w))


def run(tape: Any, function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> tuple[Any, list[Any]]:
    taped = tape.Taped(function, **options)
    return taped, [taped(call) for call in calls]


def test_operators_of_every_shape_are_replayed(tape):  # type: ignore[no-untyped-def]
    def function(x: Tensor, w: Tensor, factor: float) -> tuple[Tensor | None, ...]:
        first, second = x.view(2, 2, 3).unbind(1)
        total = torch.empty_like(first).copy_(first).add_(second, alpha=2)
        narrow = torch.empty(2, 4)[:, :3].copy_(total)
        rows = torch.cat((narrow, second)) @ w.t()
        rows.mul_(factor).index_add_(0, torch.zeros_like(rows[:1, 0], dtype=torch.int64), second[:1] @ w.t())
        return rows, None, x.sum(0, dtype=torch.float64), rows, rows.t(), x

    calls = [(torch.randn(4, 3), torch.randn(5, 3), 0.5) for _ in range(5)]
    taped, found = run(tape, function, *calls)
    assert len(tapes_of(taped)) == 1
    for call, one in zip(calls, found, strict=True):
        assert same(one, function(*call))
        assert one[0] is one[3] and one[4].data_ptr() == one[0].data_ptr() and one[5] is call[0]
    assert len({one[0].data_ptr() for one in found}) == len(found), "calls do not share memory"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + ELSEWHERE,),
        lambda x: (x * x.sum().item(),),
        lambda x: (x[x > 0],),
        lambda x: (x.nonzero(),),
        lambda x: (torch.rand_like(x),),
        lambda x: (torch.where(condition=x > 0, input=x, other=-x),),
    ],
    ids=["tensor from elsewhere", "question of the device", "mask", "nonzero", "random", "tensors by name"],
)
def test_what_cannot_be_replayed_runs_as_it_stands(tape, function):  # type: ignore[no-untyped-def]
    calls = [(torch.randn(3),) for _ in range(4)]
    torch.manual_seed(1)
    taped, found = run(tape, function, *calls)
    torch.manual_seed(1)
    assert same(found, [function(*call) for call in calls])
    named = "where" in repr(function.__code__.co_names)
    assert len(tapes_of(taped)) <= named


def test_a_call_that_raises_is_not_kept(tape):  # type: ignore[no-untyped-def]
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        if fails:
            raise MemoryError
        return (y * 2,)

    taped = tape.Taped(function)
    x, fails = torch.ones(2), False
    taped((x,))
    fails = True
    with pytest.raises(MemoryError):
        taped((x,))
    fails = False
    assert not tape._launch_plan.recorders
    assert all(torch.equal(taped((x,))[0], torch.full((2,), 4.0)) for _ in range(3))


def test_memory_goes_with_its_last_use(tape):  # type: ignore[no-untyped-def]
    taped, _ = run(tape, lambda x: ((x + 1).mul(2).add(3).neg(),), *[(torch.ones(2),)] * 2)
    (found,) = tapes_of(taped)
    assert [last_used for _, last_used in found._steps] == [(), (1,), (2,), (3,)]


class Scaling:
    """A plan and its compiled kernel in one: a fp32 vector times a number, by addresses."""

    what = "launch"
    windows: tuple[Any, ...] = ()
    is_elsewhere = False

    def __init__(self, recorders: dict[int, Any]) -> None:
        self.recorders, self.replayed = recorders, 0

    def __call__(self, grid: Any, operands: Any, numbers: Any) -> None:
        recorder = self.recorders.get(threading.get_ident())
        if recorder is None:
            self._run(grid, [one.data_ptr() for one in operands if one is not None], numbers)
        else:
            recorder.note_launch(self, grid, operands, numbers)

    def ready(self, operands: Any, numbers: Any) -> "Scaling":
        return self

    def launch(self, grid: Any, matrices: Any, addresses: Any, numbers: Any) -> bool:
        self.replayed += 1
        if self.is_elsewhere:
            return False
        assert list(matrices) == [] and addresses.count(0) == 1
        self._run(grid, [one for one in addresses if one], numbers)
        return True

    @staticmethod
    def _run(grid: Any, addresses: list[int], numbers: Any) -> None:
        assert all(type(one) in (int, float) for one in numbers)
        x, y = (ctypes.cast(address, ctypes.POINTER(ctypes.c_float)) for address in addresses)
        for place in range(grid[0]):
            y[place] = x[place] * numbers[0]


def test_launches_are_given_addresses_within_tensors(tape):  # type: ignore[no-untyped-def]
    scale = Scaling(tape._launch_plan.recorders)

    def function(x: Tensor, site: int) -> tuple[Tensor, ...]:
        parts = x.view(3, 4, 2)
        made = torch.empty(2, 5, 2)
        scale((8,), (parts[1], None, made[0, 1:]), (2.0, 1))
        scale((2,), (parts.select(0, 2)[3], None, made[0]), (site, 1))
        scale((10,), (made[0], None, made[1]), (site, 0.5))
        return made, made[1].neg()

    taped = tape.Taped(function, (1,))
    for site in (3, 5, 7, 9):
        x = torch.randn(24)
        assert same(taped((x, site)), function(x, site)), site
    assert scale.replayed == 6 and len(tapes_of(taped)) == 1
    (found,) = tapes_of(taped)
    assert len(found._steps) in (6, 7), "views for addresses alone are made"  # tests may fill new memory with NaN


def test_casts_of_inputs_are_made_together(tape, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """But for those of what a step before has written, or may have: their values are of that place alone."""
    together: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda made, given: together.append(len(made)) or copy(made, given))
    scale = Scaling(tape._launch_plan.recorders)

    def only_casts(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = x.half() @ w.half()
        return y, b.double() + y, (x + 1).half()

    def overwrites(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first = x.half(), b.half()
        w[0].add_(x[0])
        return *first, w.half(), x.half()

    def overwrites_out(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first = x.half(), b.half()
        torch.mm(x, x, out=w)
        return *first, w.half()

    def launches(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first = x.half(), b.half()
        scale((3,), (b, None, w.view(-1)[3:]), (2.0, 1))
        return *first, w.half(), b.double()

    for function, expected in (only_casts, 3), (overwrites, 2), (overwrites_out, 2), (launches, 2):
        together.clear()
        taped = tape.Taped(function)
        for _ in range(4):
            given = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
            assert same(taped(tuple(map(torch.clone, given))), function(*map(torch.clone, given))), function.__name__
        assert together == [expected] * 2, function.__name__

    together.clear()
    taped = tape.Taped(lambda x, w, b, v: (x.half(), b.half(), w.mul_(2.0), v.half()))
    for _ in range(4):
        x, w, b = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
        assert torch.equal(taped((x, w, b, w[1:]))[3], w[1:].half())
    assert together == [2] * 2, "another input in the same memory"


class Wrapped(Tensor):
    """A subclass, whatever it does."""


def test_keys_keep_no_memory(tape):  # type: ignore[no-untyped-def]
    taped = tape.Taped(lambda x, n: (x + n,))
    kept = []
    for call in range(6):
        x = torch.ones(3) if call % 2 else torch.ones(3).as_subclass(Wrapped)
        assert taped((x, 1))[0].tolist() == [2.0] * 3
        kept.append(weakref.ref(x))
    del x
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


def test_calls_run_on_the_device_of_their_tensors(tape, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Any:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    current = [1]
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    taped = tape.Taped(lambda x: (x + 1,))
    for index, expected in ((-1, []), (1, []), (0, [0] * 4)):
        monkeypatch.setattr(Tensor, "get_device", lambda x, index=index: index)
        for _ in range(4):
            assert taped((torch.ones(2),))[0].tolist() == [2.0] * 2
        assert entered == expected
    assert len(tapes_of(taped)) == 3


def test_a_launch_that_is_not_made_is_an_error(tape):  # type: ignore[no-untyped-def]
    scale = Scaling(tape._launch_plan.recorders)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty_like(x)
        scale((3,), (x, None, y), (2.0,))
        return (y,)

    taped = tape.Taped(function)
    for _ in range(3):
        assert taped((torch.ones(3),))[0].tolist() == [2.0] * 3
    scale.is_elsewhere = True
    with pytest.raises(RuntimeError, match="its device is not the current one"):
        taped((torch.ones(3),))


def test_there_are_not_ever_more_tapes(tape):  # type: ignore[no-untyped-def]
    taped = tape.Taped(lambda x, n: (x * n,))
    for n in range(3 * tape._MAX_TAPES):
        for _ in range(3):
            assert taped((torch.ones(1), n))[0].item() == n
    assert len(taped._tapes) == tape._MAX_TAPES


def test_a_kind_must_come_often(tape, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tape, "_SIGHTS", 24)
    taped, calls = tape.Taped(lambda x: (x + 1,)), 0
    while not tapes_of(taped):
        taped((torch.ones(2),))
        calls += 1
    assert calls == 25
    for size in range(3, 600):  # always another one
        for _ in range(12):
            taped((torch.ones(size),))
    assert len(tapes_of(taped)) == 0 and taped._idle > 7000
    seen = [key for key, sights in taped._tapes.items() if sights]
    assert len(seen) < 600 / tape._PROBES * 12 + tape._IDLE
    for _ in range(30 * tape._PROBES):  # one size again
        taped((torch.ones(2),))
    assert len(tapes_of(taped)) == 1 and taped._idle == 0


def test_threads(tape):  # type: ignore[no-untyped-def]
    taped = tape.Taped(lambda x, n: ((x + n).mul(2).sub(x),), (1,))
    wrong: list[Any] = []

    def work(number: int) -> None:
        for size in range(1, 60):
            x = torch.full((size,), float(number))
            for _ in range(3):
                wrong.extend([size] if not torch.equal(taped((x, 0))[0], x) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_call_without_memory_is_noted_again(kernels, monkeypatch):  # type: ignore[no-untyped-def]
    """What runs out of memory while it is noted is noted by the next call; after another error it never is."""
    a = arguments(torch.float32)
    for error, count in ((torch.OutOfMemoryError("tried to allocate 80 GiB"), 1), (RuntimeError("broken"), 0)):
        kernels._forward._tapes.clear()
        kernels._forward((*a,))
        with monkeypatch.context() as patch:

            def fail(*_: Any, error: Exception = error) -> None:
                raise error

            patch.setattr(kernels._forward, "_function", fail)
            with pytest.raises(type(error)):
                kernels._forward((*a,))
        kernels._forward((*a,))
        assert len(tapes_of(kernels._forward)) == count
