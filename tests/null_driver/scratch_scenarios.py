"""What memory programs in C++ keep for their next run, over the null driver, as `scenarios.py`."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from tests.null_driver.program_faults import ROWS, _Builder, _tensors
from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import inputs_of, make_step


class _Memory:
    """What programs that are made from now on allocate."""

    def __init__(self) -> None:
        self.count = 0
        self._made: list[weakref.ref[Tensor]] = []

    def function(self, device: torch.device) -> Callable[..., Tensor]:
        def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            made = torch.empty_strided(sizes, strides, dtype=dtype)
            self.count += 1
            self._made.append(weakref.ref(made))
            return made

        return allocate

    def there(self) -> list[int]:
        """Addresses of what has not been given up."""
        gc.collect()
        return [one.data_ptr() for made in self._made if (one := made()) is not None]


def _program(call: Callable[[Tensor], Tensor] | None = None, out_of_scratch: bool = False) -> Any:
    """x -> y by way of n rows of scratch and a view of them; `call` is made with the view.

    out_of_scratch: the view is an output, too.
    """
    from bert_fast.triton._program import part_of

    one = _Builder()
    scratch = one.empty(one.n, one.rows)
    view = one.slot()
    sizes = ("numbers", (one.rows,)), ("numbers", (one.constant(1),)), ("number", one.rows)
    one.call(part_of, ("slot", scratch), *sizes, slots=(view,))
    if call is not None:
        one.call(call, ("slot", view))
    y = one.empty(one.rows)
    one.launch(0, view)
    one.launch(scratch, y, last=() if out_of_scratch else (scratch, view))
    return one.native(y, view) if out_of_scratch else one.native(y)


def scratch(driver: NullDriver) -> dict[str, Any]:
    """By what was done between two runs, how much the second one allocates, of a result and of scratch."""
    from bert_fast.triton import _native_program

    memory = _Memory()
    found: dict[str, Any] = {}
    inputs = _tensors()

    def run(program: Any, n: int = 5) -> int:
        before = memory.count
        assert program.run(inputs, (n, 7)) is not None
        return memory.count - before

    with mock.patch.object(_native_program, "_empty_strided", memory.function):
        program, other = _program(), _program()
        found["first"] = run(program)
        found["again"] = run(program)
        found["another stride"] = [program.run(inputs, (5, 9)) is not None, memory.count]
        found["more rows"] = [run(program, 6), run(program, 6)]
        found["another program"] = [run(other), run(program), run(program)]
        driver.fail_launch(2)
        found["an error"] = [_raises(lambda: run(program)), len(memory.there()), run(program), run(program)]
        driver.capture()
        found["captured"] = [run(program), run(program), len(memory.there())]
        driver.capture(wanted=False)
        found["after it"] = [run(program), run(program)]
        streams = [0]
        active = triton.runtime.driver.active
        with mock.patch.object(active, "get_current_stream", side_effect=lambda device: streams[-1]):
            moving = _program()
        found["streams"] = []
        for streams[-1] in (0, 0, 7, 7, 0, 0):
            found["streams"].append(run(moving))
        many = (128 << 20) // ROWS // 4 + 1
        found["128 MB"] = [run(program, many), run(program, many), len(memory.there())]
        whole = _program(out_of_scratch=True)
        found["in the middle"] = _in_the_middle(driver, memory, run)
        found["an output"] = [run(whole), run(whole)]
        (y, view), (next_y, next_view) = (whole.run(inputs, (5, 7)) for _ in range(2))
        found["outputs apart"] = len({one.data_ptr() for one in (y, view, next_y, next_view)})
        found["same launches"] = _launches_of(driver, program, inputs)
        run(program)
        found["kept"] = len(memory.there())
        program = None
        found["given up"] = len(memory.there())
        found["threads"] = _of_threads(inputs)
    return found | {"refusals": driver.refusals}


def _in_the_middle(driver: NullDriver, memory: _Memory, run: Any) -> list[int]:
    """How much is there after the last use of the first of two tensors: kept, as a graph is captured, and of 128 MB."""
    counts: list[int] = []
    one = _Builder()
    first = one.empty(one.n, one.rows)
    one.launch(0, first, last=(first,))
    second = one.empty(one.n, one.rows)
    one.call(lambda: counts.append(len(memory.there())))
    one.launch(0, second, last=(second,))
    program = one.native()
    before = len(memory.there())
    run(program)
    driver.capture()
    run(program)
    driver.capture(wanted=False)
    run(program, (64 << 20) // ROWS // 4 + 1)
    return [count - before for count in counts]


def _raises(function: Callable[[], Any]) -> bool:
    try:
        function()
    except RuntimeError:
        return True
    return False


def _launches_of(driver: NullDriver, program: Any, inputs: Any) -> bool:
    """Whether a run in kept memory makes the launches that it made there before."""
    driver.note_parameters()
    program.run(inputs, (5, 7))
    launches = []
    for _ in range(2):
        driver.reset()
        (y,) = program.run(inputs, (5, 7))
        launches.append([
            (one.kernel, one.grid, one.parameters.replace(y.data_ptr().to_bytes(8, "little"), b"result"))
            for one in driver.launches()
        ])  # fmt: skip
    return launches[0] == launches[1] and len(launches[0]) == 2


def _of_threads(inputs: Any) -> int:
    """How many addresses the scratch of a program has while two threads are in the middle of it, after a first run."""
    barrier, addresses = threading.Barrier(2), list[int]()

    def meet(view: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            addresses.append(view.data_ptr())
            barrier.wait(60)
        return view

    program = _program(meet)
    program.run(inputs, (5, 7))
    threads = [threading.Thread(target=program.run, args=(inputs, (5, 7))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(set(addresses))


def backward_in_inference_mode(driver: NullDriver) -> dict[str, Any]:
    """Gradients that are missing after a backward pass within inference mode, and after one behind it."""
    step = make_step("BertForSequenceClassification", "autocast", kind="fused")
    step.inputs = inputs_of("BertForSequenceClassification", (24, 20, 17, 13))
    for _ in range(3):
        for part in ("forward", "backward"):
            step.run(part)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step.model(**step.inputs)[0]

    losses = loss(), loss()
    missing = []
    for one, is_inference in zip(losses, (True, False), strict=True):
        step.model.zero_grad()
        with torch.inference_mode(is_inference):
            one.backward()
        missing.append([name for name, each in step.model.named_parameters() if each.grad is None])
    return {"missing": missing, "refusals": driver.refusals}


SCRATCH_SCENARIOS = {one.__name__: one for one in (scratch, backward_in_inference_mode)}
