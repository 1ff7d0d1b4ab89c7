"""What programs in C++ refuse, raise and give up, over the null driver, as `scenarios.py`."""

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from tests.null_driver.plan_scenarios import _scale_kernel
from tools.null_driver.driver import NullDriver

ROWS = 64
CONSTANTS = dict(BLOCK=ROWS, num_warps=2, enable_fp_fusion=False)


class _Builder:
    """A program of `_scale_kernel` launches, calls and memory; numbers are n and stride."""

    def __init__(self, num_inputs: int = 2, *, stride: int = 7) -> None:
        from bert_fast.triton._launch_plan import launch_plan

        self.plan = launch_plan(_scale_kernel, **CONSTANTS)
        self.plan((3,), (torch.zeros(4096), torch.zeros(ROWS)), (5, stride, 0.5))
        ready = self.plan.ready((torch.zeros(4096), torch.zeros(ROWS)), (5, stride, 0.5))
        assert ready is not None
        self.ready = ready
        self.expressions: list[Any] = []
        self.n, self.stride, self.zero, self.rows = (
            self.number("argument", 0), self.number("argument", 1), self.constant(0), self.constant(ROWS)
        )  # fmt: skip
        self.num_inputs = self.num_slots = num_inputs
        self.steps: list[Any] = []
        self.guards: list[tuple[int, int]] = []
        self.readies: list[Any] = []

    def number(self, op: str, a: int, b: int = 0) -> int:
        from bert_fast.triton._program import Expression

        self.expressions.append(Expression(op, a, b))
        return len(self.expressions) - 1

    def constant(self, value: int) -> int:
        return self.number("constant", value)

    def _add(self, what: Any, last_used: tuple[int, ...]) -> None:
        from bert_fast.triton._program import Step

        self.steps.append(Step(what, last_used))

    def launch(
        self, x: int, y: int, *, offset: int | None = None, grid: int | None = None, blocks: Any = (), last: Any = ()
    ) -> None:
        from bert_fast.triton._program import Launch

        operands = ((x, self.zero if offset is None else offset), (y, self.zero))
        numbers = ((True, self.n), (True, self.stride), (False, 0.5))
        self.readies.append(self.ready)
        self._add(Launch(self.plan, (self.n if grid is None else grid, *blocks), operands, numbers, ()), last)

    def slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32, last: Any = ()) -> int:
        from bert_fast.triton._program import Empty

        slot = self.slot()
        self._add(Empty(slot, shape or (self.rows,), dtype), last)
        return slot

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        names: tuple[str, ...] = (),
        slots: Any = (),
        last: Any = (),
    ) -> None:
        from bert_fast.triton._program import Argument, Call

        self._add(Call(function, tuple(Argument(*one) for one in arguments), names, slots), last)

    def program(self, *outputs: int) -> Any:
        from bert_fast.triton._program import Program

        return Program(
            self.num_inputs, self.num_slots, tuple(self.expressions), tuple(self.guards), tuple(self.steps), outputs
        )

    def native(self, *outputs: int) -> Any:
        from bert_fast.triton._native_program import native_program

        return native_program(self.program(*outputs), self.readies)


def _tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(4096), torch.zeros(ROWS)


def _raised(function: Callable[[], Any]) -> str:
    try:
        return f"returned {function()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def programs_refuse(driver: NullDriver) -> dict[str, Any]:
    """Of runs, whether they returned None and how many launches there were; of forms, whether there is a program."""
    found: dict[str, Any] = {}
    x, y = _tensors()

    def build(guard: tuple[int, int] | None = None, stride: int = 7, **options: Any) -> Any:
        one = _Builder(stride=stride)
        if guard is not None:
            one.guards.append((one.number("%", one.n, one.constant(guard[0])), guard[1]))
        one.launch(0, 1, **{name: option(one) for name, option in options.items()})
        return one.native()

    def run(label: str, native: Any, inputs: Any = (x, y), numbers: Any = (5, 7)) -> None:
        driver.reset()
        found[label] = [native.run(inputs, numbers) is None, driver.num_launches]

    native = build()
    run("fits", native)
    run("list", native, [x, y])
    run("other numbers", native, numbers=(6, 9))
    run("not specialised for this one", native, numbers=(16, 9))
    run("stride of 16", native, numbers=(5, 16))
    run("stride of 1", native, numbers=(5, 1))
    run("wide", native, numbers=(2**31, 7))
    run("wide stride", native, numbers=(5, 2**31 + 1))
    run("very wide", native, numbers=(2**70, 7))
    run("no programs", native, numbers=(0, 7))
    run("operand at 4", native, (x[1:], y))
    run("operand at 16", native, (x[4:], y))
    run("other operand at 4", native, (x, y[1:]))
    run("no operand", native, (x, None))
    run("nothing", native, (None, None))
    run("16 where compiled", build(stride=16), numbers=(5, 32))
    run("7 where compiled for 16", build(stride=16), numbers=(5, 7))
    run("1 where compiled", build(stride=1), numbers=(5, 1))
    run("7 where compiled for 1", build(stride=1), numbers=(5, 7))
    run("guard holds", build(guard=(3, 2)), numbers=(5, 7))
    run("guard", build(guard=(3, 2)), numbers=(6, 7))
    run("guard of a negative number", build(guard=(-3, -1)), numbers=(5, 7))
    run("division by zero", build(grid=lambda b: b.number("//", b.n, b.number("-", b.n, b.n))))
    run("overflow", build(grid=lambda b: b.number("*", b.constant(2**62), b.n)))
    run("offset of 16", build(offset=lambda b: b.number("*", b.n, b.constant(16))))
    run("offset of 5", build(offset=lambda b: b.n))
    run("negative grid", build(grid=lambda b: b.number("-", b.zero, b.n)))
    with mock.patch.object(triton.runtime.driver.active, "get_current_device", return_value=1):
        elsewhere = build()
    run("another device is the current one", elsewhere)
    one = _Builder()
    one.launch(0, 1)
    with mock.patch.object(one.ready, "tensor_device", 0):
        elsewhere = one.native()
    run("tensors of another device", elsewhere)
    for label, function in {
        "type of inputs": lambda: native.run({}, (5, 7)),
        "number of inputs": lambda: native.run((x,), (5, 7)),
        "type of an input": lambda: native.run((x, 3), (5, 7)),
        "number of numbers": lambda: native.run((x, y), (5,)),
        "type of a number": lambda: native.run((x, y), (5, 7.0)),
        "arguments": lambda: native.run((x, y)),
    }.items():
        found[label] = _raised(function)
    return found


def forms_are_checked(driver: NullDriver) -> dict[str, bool]:
    """Whether there is a program of a form."""

    def is_one(change: Callable[[_Builder], Any], *outputs: int) -> bool:
        one = _Builder()
        one.launch(0, 1)
        change(one)
        return one.native(*outputs) is not None

    def replaced(**fields: Any) -> Callable[[_Builder], None]:
        def change(one: _Builder) -> None:
            one.steps[0] = one.steps[0]._replace(what=one.steps[0].what._replace(**fields))

        return change

    from bert_fast.triton._program import Window

    numbers = ((True, 0), (True, 1), (False, 0.5))
    return {
        "as it is": is_one(lambda one: None, 0, -1),
        "a slot that there is not": is_one(lambda one: one.launch(0, 2)),
        "an output that there is not": is_one(lambda one: None, 2),
        "a number that there is not": is_one(replaced(grid=(99,))),
        "a later number": is_one(lambda one: one.number("+", 0, 99)),
        "an operation": is_one(lambda one: one.number("**", 0, 0)),
        "read while empty": is_one(lambda one: (one.slot(), one.launch(2, 1))),
        "given up": is_one(lambda one: (one.launch(0, 1, last=(1,)), one.launch(0, 1))),
        "an output that was given up": is_one(lambda one: one.launch(0, 1, last=(1,)), 1),
        "given up twice": is_one(lambda one: one.launch(0, 1, last=(1, 1))),
        "no operand": is_one(replaced(operands=((0, 2), None))),
        "fewer operands": is_one(replaced(operands=((0, 2),))),
        "more numbers": is_one(replaced(numbers=(*numbers, (True, 0)))),
        "fewer numbers": is_one(replaced(numbers=numbers[:2])),
        "float for an integer": is_one(replaced(numbers=((False, 5.0), *numbers[1:]))),
        "integer for a float": is_one(replaced(numbers=(*numbers[:2], (True, 0)))),
        "grid of four": is_one(replaced(grid=(0, 0, 0, 0))),
        "a window": is_one(replaced(windows=(Window(0, 0, 0, 0, (64, 64)),))),
        "a constant of 70 bits": is_one(lambda one: one.constant(2**70)),
        "no integer": is_one(replaced(grid=("n",))),
        "no kernel": is_one(lambda one: one.readies.pop()),
    }


def programs_fail_in_the_middle(driver: NullDriver) -> dict[str, Any]:
    """What is raised, launches up to there, and whether all tensors were given up."""
    found: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop("here")

    def case(label: str, build: Callable[[_Builder], Any], numbers: tuple[int, ...] = (5, 7)) -> None:
        one, (x, y) = _Builder(), _tensors()
        one.launch(0, 1)
        made = one.empty()
        alive: list[Any] = []
        one.call(lambda tensor: alive.append(weakref.ref(tensor)), ("slot", made))
        build(one)
        native = one.native(made)
        before = sys.getrefcount(x), sys.getrefcount(y)
        driver.reset()
        text = _raised(lambda: native.run((x, y), numbers))
        gone = all(ref() is None for ref in alive) and (sys.getrefcount(x), sys.getrefcount(y)) == before
        found[label] = [text.replace("\n", " ")[:90], driver.num_launches, gone and len(alive) == 1]

    def view(tensor: Tensor) -> Tensor:
        return tensor[1:]

    def calls(one: _Builder, function: Callable[..., Any], *, slots: int = 1, **options: Any) -> int:
        places = [one.slot() for _ in range(slots)]
        one.call(function, ("slot", 0), slots=tuple(places))
        if options:
            one.launch(places[0], 1, **options)
        return places[0]

    case("a call", lambda one: calls(one, stop))
    case("memory", lambda one: one.empty(one.constant(2**60)))
    case("a negative size", lambda one: one.empty(one.constant(-1)))
    case("no tensor", lambda one: calls(one, lambda tensor: None, last=()))
    case("too few results", lambda one: calls(one, lambda tensor: (tensor,), slots=2))
    case("no results", lambda one: calls(one, lambda tensor: None, slots=2))
    case("elsewhere in memory", lambda one: calls(one, view, offset=one.constant(16)))
    case("a launch", lambda one: one.launch(0, 1, blocks=(one.constant(70_000),)))
    found["by the plan"] = _by_the_plan(driver, view)
    return found


def _by_the_plan(driver: NullDriver, view: Callable[[Tensor], Tensor]) -> list[Any]:
    """A result of a call that lies at no multiple of 16 bytes: the plan finds the kernel that is for it."""
    one, (x, y) = _Builder(), _tensors()
    place = one.slot()
    one.call(view, ("slot", 0), slots=(place,))
    one.launch(place, 1)
    native = one.native()
    driver.note_parameters()
    one.plan((5,), (x[1:], y), (5, 7, 0.5))  # compiled
    driver.reset()
    outputs = native.run((x, y), (5, 7))
    one.plan((5,), (x[1:], y), (5, 7, 0.5))
    ours, theirs = driver.launches()
    return [outputs, ours == theirs]


def programs_keep_nothing(driver: NullDriver) -> dict[str, Any]:
    """What 1,000 runs leave: references, blocks of memory. What calls are given. Runs within runs and by threads."""
    found: dict[str, Any] = {}
    one, (x, y) = _Builder(), _tensors()
    seen: list[Any] = []
    name = "a constant that is no other"

    def identity(*arguments: Any, **named: Any) -> list[Any]:
        seen[:] = [*map(type, arguments), *named.items()]
        return [arguments[0], None]

    one.launch(0, 1)
    made = one.empty(one.n, one.constant(3))
    scalar = one.slot()
    one.call(
        identity, ("slot", made), ("slots", (0, 1)), ("number", one.stride), ("numbers", (one.n, one.zero)),
        ("constant", name), names=("text",), slots=(scalar, -1), last=(made,),
    )  # fmt: skip
    # A step frees the tensors that it reads last, before the next step runs.
    freed, references, are_gone = one.slot(), list[Any](), list[bool]()
    one.call(torch.zeros, ("number", one.n), slots=(freed,))
    one.call(lambda tensor: references.append(weakref.ref(tensor)), ("slot", freed), last=(freed,))
    one.call(lambda: are_gone.append(references.pop()() is None))
    one.empty(one.stride, dtype=torch.int64)
    native = one.native(scalar, -1, 0)
    dtype = torch.int64
    watched = {"x": x, "y": y, "function": identity, "constant": name, "plan": one.plan, "dtype": dtype}
    for _ in range(3):  # shapes that change, then ones that do not
        for n in (300, 5):
            assert native.run((x, y), (n, 700)) is not None
    gc.collect()

    def counts() -> dict[str, int]:
        return {label: sys.getrefcount(value) for label, value in watched.items()}

    before, blocks = counts(), sys.getallocatedblocks()
    for i in range(1000):
        native.run((x, y), (300 + i % 2, 700))
    driver.reset()
    found["references"] = counts() == before
    found["given back"] = [len(are_gone), all(are_gone)]
    are_gone.clear()
    found["blocks"] = sys.getallocatedblocks() - blocks
    outputs = native.run((x, y), (5, 7))
    found["outputs"] = [[*outputs[0].shape], outputs[1], outputs[2] is x]
    found["arguments"] = [getattr(one, "__name__", list(one) if isinstance(one, tuple) else one) for one in seen]
    found.update(_runs_within_runs(driver))
    found["given up"] = _is_given_up()
    return found


def _runs_within_runs(driver: NullDriver) -> dict[str, Any]:
    one, (x, y) = _Builder(), _tensors()
    made = one.empty(one.n)
    depth: list[int] = []

    def again(tensor: Tensor) -> None:
        depth.append(len(tensor))
        if len(depth) < 20:
            native.run((x, y), (len(depth) + 1, 7))

    one.call(again, ("slot", made))
    one.launch(made, 1)
    native = one.native(made)
    driver.reset()
    outputs = native.run((x, y), (1, 7))
    found: dict[str, Any] = {"within": [len(outputs[0]), depth == [*range(1, 21)], driver.num_launches]}
    wrong: list[int] = []

    def many(n: int) -> None:
        for _ in range(300):
            if len(native.run((x, y), (n, 7))[0]) != n:
                wrong.append(n)

    threads = [threading.Thread(target=many, args=(n,)) for n in range(100, 104)]
    depth[:] = [0] * 20
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    found["threads"] = [wrong, driver.num_launches]
    return found


def _is_given_up() -> bool:
    """A program that holds itself goes with the collector."""

    class Function:
        def __call__(self, tensor: Tensor) -> None:
            pass

    one, function = _Builder(), Function()
    one.launch(0, 1)
    one.call(function, ("slot", 0))
    function.program = one.native()  # type: ignore[attr-defined]
    gone = weakref.ref(function)
    del one, function
    gc.collect()
    return gone() is None


def kernels_are_checked(driver: NullDriver) -> dict[str, Any]:
    """What a kernel is refused for whose parameters are not those of its cubin, or that is not known otherwise."""
    from bert_fast import native
    from bert_fast.triton import _native_program
    from bert_fast.triton._native_program import kernel_of

    extension = native.load()
    assert extension is not None
    compiled = _Builder().ready.compiled
    pointer, integer = ("pointer", True), ("i32", True, False)
    arguments = (pointer, pointer, integer, integer, ("fp32",), ("constant",))
    cubin = compiled.asm["cubin"]
    given = dict(
        name="_scale_kernel", function=compiled.function, cubin=cubin, threads=64, shared_bytes=0, device=0,
        arguments=arguments, owner=compiled,
    )  # fmt: skip

    def made(**changed: Any) -> str:
        return _raised(lambda: extension.Kernel(**given | changed).name)

    found = {
        "as it is": made(),
        "an argument less": made(arguments=arguments[1:]),
        "one more": made(arguments=(pointer, *arguments)),
        "another size": made(arguments=(pointer, integer, pointer, integer, *arguments[4:])),
        "another name": made(name="_other_kernel"),
        "no cubin": made(cubin=b"no cubin"),
        "another type": made(arguments=(("i64", False, False), *arguments[1:])),
    }
    # Bytes that are not as they were: read or refused, whatever they say.
    rng, answers = random.Random(3), set[str]()
    for _ in range(3000):
        changed = bytearray(cubin[: rng.choice((len(cubin), rng.randrange(len(cubin))))])
        for _ in range(rng.randrange(1, 40)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.choice((0, 1, 255, rng.randrange(256)))
        answers.add(made(cubin=bytes(changed))[:10])
    found["damaged"] = " ".join(sorted(answers))

    def is_known(**changed: Any) -> bool:
        ready = _Builder().ready
        _native_program._kernels.clear()
        with mock.patch.multiple(ready.compiled.run, **changed):
            return kernel_of(ready) is not None

    found["known"] = [
        is_known(launch_pdl=False), is_known(launch_pdl=True), is_known(launch_cooperative_grid=True),
        is_known(global_scratch_size=8), is_known(profile_scratch_size=8),
    ]  # fmt: skip
    _native_program._kernels.clear()
    return found


def program_faults(driver: NullDriver) -> dict[str, Any]:
    """All of the above, in one process."""
    kept = programs_fail_in_the_middle, programs_keep_nothing
    parts = programs_refuse, forms_are_checked, *kept, kernels_are_checked
    return {part.__name__: part(driver) for part in parts}


FAULT_SCENARIOS = {"program_faults": program_faults}
