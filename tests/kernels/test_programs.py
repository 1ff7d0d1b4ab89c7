"""Programs: calls of other sizes have the bits of calls that run as they stand, and what cannot be traced does so."""

import gc
import threading
import weakref
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bert_fast import backend
from bert_fast.reference.encoder_layer import EncoderLayer
from bert_fast.storage import join_memory, separate_memory
from bert_fast.triton._program import Call
from tests.kernels.test_encoder_layer import ALL, HIDDEN, arguments, upstream

pytestmark = pytest.mark.interpreter


@pytest.fixture
def programs():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    from bert_fast.triton import _programs

    return _programs


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    found = backend.resolve("encoder_layer", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")
    for one in (found._forward, found._backward):
        one.forget()
    return found


# What ships: everything that chooses kernels, alone and in combinations that models have.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "one bias less": {"down_bias": None, "up_bias": None},
    "no biases of projections": {"query_bias": None, "key_bias": None, "value_bias": None},
    "no bias behind attention": {"attention_output_bias": None},
    "probabilities alone": {"attention_dropout_p": 0.0, "dropout_p": 0.0},
    "no dropout": {"probabilities_dropout_p": 0.0, "attention_dropout_p": 0.0, "dropout_p": 0.0, "seed": None},
    "causal without dropout": {
        "causal": True, "probabilities_dropout_p": 0.0, "attention_dropout_p": 0.0, "dropout_p": 0.0, "seed": None,
    },
    "relu": {"hidden_act": "relu"},
    "input": {"attention_saves": "input", "saves": "input"},
    "device": {"attention_saves": "device", "saves": "device"},
    "again": {"attention_saves": "again", "saves": "again"},
    "again behind attention": {"attention_saves": "again"},
    "nothing kept": {"keeps": False},
}  # fmt: skip
WANTS = (ALL, ALL - {"x"}, ALL - {"qkv_bias", "up_bias"}, frozenset({"down_weight", "up_weight"}), frozenset())


def runners_of(programs: Any) -> list[Any]:
    """The runners of each kind of call, None for those that cannot be traced."""
    return [kind.runners for kind in programs._kinds.values()]


def made_by(programs: Any) -> list[int]:
    """How many programs each kind of call has; all kinds have some."""
    kinds = runners_of(programs)
    is_traced = all(runners is not None and all(one._is_one for one in runners) for runners in kinds)
    assert is_traced, "a call could not be traced"
    return [len(runners) for runners in kinds]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if ours is None or theirs is None:
        return ours is theirs
    alike = ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and ours.shape == theirs.shape
    return alike and torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def of_lengths(a: EncoderLayer, lengths: tuple[int, ...], *, rows: bool) -> EncoderLayer:
    """The layer on other texts; rows: of every second token."""
    num_tokens = sum(lengths)
    coords = torch.tensor([(row, place) for row, n in enumerate(lengths) for place in range(n)], dtype=torch.int32)
    coords = coords.view(num_tokens, 2)
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    chosen = torch.arange(0, num_tokens, 2) if rows else None
    queries = offsets if chosen is None else torch.searchsorted(chosen, offsets.long(), out_int32=True)
    return a._replace(
        x=torch.randn(num_tokens, HIDDEN).to(a.x.dtype), rows=chosen, cu_seqlens_q=queries, cu_seqlens_k=offsets,
        max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), coords_q=coords if chosen is None else coords[chosen],
        coords_k=coords,
    )  # fmt: skip


LENGTHS = ((0,), (3, 4, 2), (1,), (5, 0, 2), (17,), (0, 0))


@pytest.mark.parametrize("of_parameters", [None, torch.float32], ids=["of one dtype", "fp32 parameters"])
@pytest.mark.parametrize("rows", [False, True], ids=["all", "rows"])
@pytest.mark.parametrize("saves", ["output", "again"])
def test_layers_of_any_lengths_bit_for_bit(kernels, of_parameters, rows, saves):  # type: ignore[no-untyped-def]
    if rows and saves == "again":
        saves = "device"
    of_kind = arguments(torch.float16, dropout_p=0.2, of_parameters=of_parameters)
    of_kind = of_kind._replace(attention_saves=saves, saves=saves)
    for number, lengths in enumerate(LENGTHS):
        a = of_lengths(of_kind, lengths, rows=rows)._replace(probabilities_site=5 * number, site=7 * number + 2)
        a = a._replace(seed=torch.tensor([number]))
        y, *saved = kernels.encoder_layer_fwd(a)
        dy = upstream(a) * (number + 1)
        made = kernels.encoder_layer_bwd(a, dy, y, *saved, ALL)
        expected = kernels.OPS.forward(a)
        assert same((y, *saved), expected), lengths
        assert same(made, kernels.OPS.backward(a, dy, *expected, wants=ALL)), lengths
    for one in (kernels._forward, kernels._backward):
        (count,) = made_by(one)
        assert count <= len(LENGTHS)


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_layers_have_programs_with_their_bits(kernels, name):  # type: ignore[no-untyped-def]
    """Half the kinds in half precision with fp32 parameters, the others in fp32; half of all rows; two lengths, so that
    each replays.
    """
    number = list(KINDS).index(name)
    is_wide, again = number % 2 == 0, "again" in KINDS[name].values()
    rows = number // 2 % 2 == 1 and not again  # what is computed again has all rows
    dtype = torch.float32 if is_wide and not again else torch.float16
    of_kind = arguments(dtype, dropout_p=0.2, of_parameters=torch.float32)._replace(**KINDS[name])
    wants = WANTS[number % len(WANTS)]
    for lengths in ((6, 0, 3), (2,), (21, 1)):
        a = of_lengths(of_kind, lengths, rows=rows)
        y, *saved = kernels.encoder_layer_fwd(a)
        expected = kernels.OPS.forward(a)
        assert same((y, *saved), expected), lengths
        if a.keeps:
            dy = upstream(a)
            made = kernels.encoder_layer_bwd(a, dy, y, *saved, wants)
            assert same(made, kernels.OPS.backward(a, dy, *expected, wants=wants)), lengths
    assert sum(made_by(kernels._forward)) < 4 and sum(made_by(kernels._backward)) < 4


def test_calls_of_other_kinds_have_programs_of_their_own(kernels):  # type: ignore[no-untyped-def]
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
        "strides": a._replace(x=a.x.t().contiguous().t()),
        "not aligned": a._replace(x=torch.cat([a.x.flatten(), a.x[0, :1]])[1:].view(a.x.shape)),
        "half precision": a._replace(x=a.x.half()),
    }
    expected = {name: kernels.OPS.forward(other) for name, other in others.items()}
    for number, (name, other) in enumerate(others.items(), 1):
        assert same(kernels.encoder_layer_fwd(other), expected[name]), name
        assert len(made_by(kernels._forward)) == number, name
    for name, other in others.items():
        assert same(kernels.encoder_layer_fwd(other), expected[name]), name


@pytest.mark.parametrize("rows", [False, True], ids=["all", "rows"])
@pytest.mark.parametrize("of_parameters", [None, torch.float32], ids=["of one dtype", "fp32 parameters"])
def test_parameters_in_one_block_are_read_where_they_are(kernels, of_parameters, rows):  # type: ignore[no-untyped-def]
    for call in range(3):
        a = arguments(torch.float16, rows=rows, of_parameters=of_parameters)
        weights, biases = ([nn.Parameter(t) for t in a[first:7:2]] for first in (1, 2))
        join_memory(*weights)
        join_memory(*biases)
        for place, parameter in zip((1, 3, 5, 2, 4, 6), (*weights, *biases), strict=True):
            a = a._replace(**{a._fields[place]: parameter})
        with torch.no_grad():
            assert same(kernels.encoder_layer_fwd(a), kernels.OPS.forward(a)), call
            weights[0].add_(1.0)
            assert same(kernels.encoder_layer_fwd(a), kernels.OPS.forward(a)), call
    assert made_by(kernels._forward) == [1]
    ((runner,),) = runners_of(kernels._forward)
    calls = [step.what.function for step in runner.program.steps if isinstance(step.what, Call)]
    assert torch.cat not in calls


def test_parameters_may_change_between_calls(kernels):  # type: ignore[no-untyped-def]
    def look(what: str) -> None:
        with torch.no_grad():
            assert same(kernels.encoder_layer_fwd(a), kernels.OPS.forward(a)), what

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
            look(f"{name}, {place}")
    join_memory(*parameters[0:6:2])
    look("joined")
    separate_memory(*parameters[0:6:2])
    look("apart")


def test_which_argument_is_missing_tells_calls_apart(programs):  # type: ignore[no-untyped-def]
    def function(x: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
        return (torch.mm(x, a) if b is None else torch.mm(b, x),)

    ours, x, other = programs.Programs(function, sizes={}), torch.randn(3, 3), torch.randn(3, 3)
    for _ in range(2):
        for call in ((x, other, None), (x, None, other)):
            assert same(ours(call), function(*call))
    assert made_by(ours) == [1, 1]


def test_sizes_of_one_name_that_are_not_equal_are_another_kind(programs):  # type: ignore[no-untyped-def]
    ours = programs.Programs(lambda x, y: (x.new_empty(x.shape).zero_(),), sizes={0: "T_", 1: "T"})
    for rows, others in ((3, 3), (5, 5), (3, 4), (4, 4)):
        assert ours((torch.ones(rows, 2), torch.ones(others)))[0].shape == (rows, 2)
    assert made_by(ours) == [1, 1]


def test_a_part_of_a_row_is_no_row(programs):  # type: ignore[no-untyped-def]
    """Of one row a part is contiguous, too: of an input [T, 3, D] the second third of each."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        _, middle, _ = x.view(x.shape[0], 3, 2).unbind(1)
        return (torch.mm(middle, middle.t()),)

    for sizes in ((1, 4), (4, 1)):
        ours = programs.Programs(function, sizes={0: "T_"})
        for size in sizes:
            x = torch.randn(size, 6)
            assert same(ours((x,)), function(x)), size


def add_in_place(x: Tensor) -> tuple[Tensor, ...]:
    return (x.add_(1.0),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1,),
        lambda x: (x * x.sum().item(),),
        lambda x: (x[x > 0],),
        lambda x: (torch.rand_like(x),),
        add_in_place,
    ],
    ids=["an operator that nobody taught", "question of the device", "mask", "random", "an argument is written to"],
)
def test_what_cannot_be_traced_runs_as_it_stands(programs, function):  # type: ignore[no-untyped-def]
    calls = [torch.randn(3) for _ in range(3)]
    torch.manual_seed(1)
    ours = programs.Programs(function, sizes={0: "T"})
    found = [ours((x.clone(),)) for x in calls]
    torch.manual_seed(1)
    assert same(found, [function(x.clone()) for x in calls])
    assert runners_of(ours) == [None] and not programs._launch_plan.recorders


def test_sizes_that_cannot_be_traced_are_told_by_guards(programs):  # type: ignore[no-untyped-def]
    """A call of few rows does not take its program from a call of many, whichever comes first."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 1 if x.shape[0] < 3 else torch.mm(x, x),)

    for sizes in ((2, 3, 1, 4), (4, 1, 3, 2)):
        ours = programs.Programs(function, sizes={0: "TT"})
        with mock.patch.object(ours, "_trace", side_effect=ours._trace) as trace:
            for size in sizes:
                x = torch.randn(size, size)
                assert same(ours((x,)), function(x)), size
        assert trace.call_count == 2 and [*map(len, runners_of(ours))] == [2]


def test_what_has_too_many_programs_is_not_traced_again(programs, monkeypatch):  # type: ignore[no-untyped-def]
    def function(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(int(x.shape[0]))  # a program for each number of rows
        return (torch.mm(x, x.t()),)

    monkeypatch.setattr(programs, "_MAX_PROGRAMS", 4)
    ours, calls = programs.Programs(function, sizes={0: "T_"}), list[int]()
    for size in (1, 2, 3, 4, 5, 6, 5, 1):
        assert same(ours((torch.ones(size, 2),))[0], torch.full((size, size), 2.0))
    assert calls == [1, 2, 3, 4, 5, 6, 5] and made_by(ours) == [4]


def test_what_native_refuses_is_run_here(programs):  # type: ignore[no-untyped-def]
    class Refuses:
        @staticmethod
        def run(inputs: Any, numbers: Any) -> None:
            return None

    ours = programs.Programs(lambda x: (torch.mm(x, x),), sizes={0: "TT"})
    for size in (2, 3, 2, 3):
        assert same(ours((torch.ones(size, size),))[0], torch.full((size, size), float(size)))
        for runner in runners_of(ours)[0]:
            runner._native = Refuses
    assert made_by(ours) == [1]


def test_a_model_of_another_device_has_its_programs_there(programs, monkeypatch):  # type: ignore[no-untyped-def]
    """No call brings another program because the current device is not its own."""
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Any:
        entered.append(index)
        current[0] = index
        yield
        current[0] = 0

    current, x = [0], torch.ones(2, 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(Tensor, "get_device", lambda x: 1)
    ours = programs.Programs(lambda x: (x,), sizes={})
    trace = lambda trace: (torch.mm(*[trace.input_like(x, "TT", {"T": trace.numbers.arguments[0]})] * 2),)  # noqa: E731

    class Native:
        """As `_native`, which runs programs on the current device."""

        @staticmethod
        def run(inputs: Any, numbers: Any) -> Any:
            return runner.run_here(inputs, numbers) if current[0] == 1 else None

    for _ in range(3):
        assert ours.run(ours.kind_of("key"), (x,), (2,), trace)[0].tolist() == [[2.0] * 2] * 2
        ((runner,),) = runners_of(ours)
        runner._native = Native
    assert entered == [1] * 3


def test_an_error_of_a_call_is_its_own(programs):  # type: ignore[no-untyped-def]
    def function(x: Tensor) -> tuple[Tensor, ...]:
        if fails:
            raise MemoryError
        return (torch.mm(x, x),)

    ours, x, fails = programs.Programs(function, sizes={0: "T_"}), torch.ones(2, 2), True
    with pytest.raises(MemoryError):
        ours((x,))
    assert not programs._launch_plan.recorders
    fails = False
    assert all(torch.equal(ours((x,))[0], torch.full((2, 2), 2.0)) for _ in range(3))


def test_memory_goes_with_its_last_use(programs):  # type: ignore[no-untyped-def]
    ours = programs.Programs(lambda x: (torch.mm(torch.mm(torch.mm(x, x), x), x),), sizes={0: "T_"})
    ours((torch.ones(2, 2),))
    ((runner,),) = runners_of(ours)
    assert [last_used for _, last_used in runner.program.steps] == [(), (1,), (2,)]


def test_casts_of_arguments_are_made_together(programs, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    together: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda made, given: together.append(len(made)) or copy(made, given))

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = torch.mm(x.to(torch.float16), w.to(torch.float16))
        return torch.mm(first, v.to(torch.float16)), torch.mm(first, w.to(torch.float16))

    ours = programs.Programs(function, sizes={0: "T_"})
    for rows in (3, 5):
        given = torch.randn(rows, 3), torch.randn(3, 3), torch.randn(3, 3)
        assert same(ours(given), function(*given))
    assert together == [3, 3]


def test_kinds_keep_no_memory(programs):  # type: ignore[no-untyped-def]
    ours = programs.Programs(lambda x, n: (torch.mm(x, x),), sizes={0: "T_"})
    kept = []
    for _ in range(4):
        x = torch.ones(3, 3)
        assert ours((x, 1))[0].shape == (3, 3)
        kept.append(weakref.ref(x))
    del x
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


def test_calls_run_on_the_device_of_their_tensors(programs, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
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
    ours = programs.Programs(lambda x: (torch.mm(x, x),), sizes={0: "T_"})
    for index, expected in ((-1, []), (1, []), (0, [0] * 2)):
        monkeypatch.setattr(Tensor, "get_device", lambda x, index=index: index)
        for _ in range(2):
            assert ours((torch.ones(2, 2),))[0].tolist() == [[2.0] * 2] * 2
        assert entered == expected


@pytest.mark.parametrize("order", [(1, 4), (4, 1, 4), (1, 1, 4, 2)])
def test_a_single_row_is_of_any_stride(programs, order):  # type: ignore[no-untyped-def]
    """It counts as contiguous; rows that lie as far apart are not, and have a program of their own."""
    ours = programs.Programs(lambda x: (x.contiguous().view(x.shape[0] * 4),), sizes={0: "T_"})
    wide = torch.arange(60.0).view(5, 12)
    for rows in order:
        for x in (wide[:rows, :4], torch.randn(rows, 4), wide[:rows, 4:8]):
            assert torch.equal(ours((x,))[0], x.flatten()), rows


def test_there_are_not_ever_more_kinds(programs):  # type: ignore[no-untyped-def]
    ours = programs.Programs(lambda x, n: (torch.mm(x, x),), sizes={0: "T_"})
    for n in range(programs._MAX_KINDS + 20):
        assert ours((torch.ones(1, 1), n))[0].item() == 1
    assert len(ours._kinds) == programs._MAX_KINDS


def test_threads(programs):  # type: ignore[no-untyped-def]
    def function(x: Tensor, n: int) -> tuple[Tensor, ...]:
        made = torch.mm(x, x.t())
        return (made.addmm_(made, made) if x.shape[0] > 20 else made,)

    ours, wrong = programs.Programs(function, sizes={0: "T_"}), list[Any]()

    def work(number: int) -> None:
        for size in range(1, 40):
            x = torch.full((size, 2), float(number))
            wrong.extend([size] if not torch.equal(ours((x, 0))[0], function(x, 0)[0]) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
