"""What the tests of prepared launches run over the null driver, as `scenarios.py`."""

from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import PARTS, inputs_of, make_step

Asked = list[tuple[Any, ...]]


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(x_ptr, y_ptr, n, stride, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs * stride, mask=offs < n)
    if y_ptr is not None:
        tl.store(y_ptr + offs, x * factor, mask=offs < n)


def _note_launches(device: NullDriver) -> Asked:
    """What Triton's launcher in C is given from now on, tensors by their addresses."""
    asked: Asked = []
    active = triton.runtime.driver.active
    launch = active.utils.launch
    if not hasattr(active.utils, "build_signature_metadata"):
        raise RuntimeError("this Triton has a launcher for each kernel")

    def noting(*arguments: Any) -> None:
        *first, annotations, signature, given = arguments
        asked.append((*first, id(annotations), signature, *map(_value, given)))
        launch(*arguments)

    active.utils.launch = noting
    return asked


def _without_hooks(asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """Triton gives hooks although nothing is in them."""
    return asked[:8] + asked[11:]


def _value(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return 0 if value is None else value.data_ptr()
    return "map" if type(value).__name__ == "PyCUtensorMap" else value


def plans_ask_for_the_same(driver: NullDriver) -> dict[str, Any]:
    """How many launches of whole steps were compared with Triton's own, by kernel, and those that differ.

    Launches of Triton's are made twice, by it and by the plan.
    """
    import bert_fast  # noqa: F401  with the answers of a GPU
    from bert_fast.triton._launch_plan import LaunchPlan, recorders

    asked, compared, wrong = _note_launches(driver), dict[str, int](), list[str]()
    run, run_by_triton = LaunchPlan.__call__, LaunchPlan._launch_by_triton

    def both(plan: Any, grid: Any, operands: Any, numbers: Any = ()) -> None:
        if recorders:  # comes here again
            run(plan, grid, operands, numbers)
            return
        run_by_triton(plan, grid, operands, numbers)
        with mock.patch.object(LaunchPlan, "_launch_by_triton") as by_triton:
            run(plan, grid, operands, numbers)
        if by_triton.called:
            return  # with a number of more than 32 bits
        name = plan._kernel.__name__
        compared[name] = compared.get(name, 0) + 1
        *_, theirs, ours = asked
        if _without_hooks(theirs) != _without_hooks(ours):
            wrong.append(f"{name}: {theirs} by Triton, {ours} by the plan")
        asked.clear()

    with mock.patch.object(LaunchPlan, "__call__", both):
        for name, precision, lengths in (
            ("BertForPreTraining", "autocast", (24, 20, 17, 13)),
            ("BertForSequenceClassification", "bf16", (130, 20, 17, 13)),
            ("BertForQuestionAnswering", "fp32", (64, 32, 16, 16)),
            ("BertModel", "bf16", (16, 16)),
        ):
            step = make_step(name, precision)
            step.inputs = inputs_of(name, lengths)
            for part in PARTS:
                step.run(part)
    return {"compared": compared, "wrong": wrong[:3], "refusals": driver.refusals}


def who_launches(driver: NullDriver) -> dict[str, list[Any]]:
    """Of calls of one plan: whether Triton launched, kernels compiled by then, and whether both ask for the same."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from bert_fast.triton._launch_plan import LaunchPlan, launch_plan

    asked, constants = _note_launches(driver), dict(BLOCK=64, num_warps=2, enable_fp_fusion=False)
    plan = launch_plan(_scale_kernel, **constants)
    assert plan is launch_plan(_scale_kernel, **constants)
    x, y = torch.zeros(4096), torch.zeros(64)
    found: dict[str, list[Any]] = {}

    def call(label: str, operands: tuple[Any, ...], numbers: tuple[Any, ...], grid: tuple[int, ...] = (3,)) -> None:
        driver.reset()
        asked.clear()
        launch_by_triton = LaunchPlan._launch_by_triton
        with mock.patch.object(
            LaunchPlan, "_launch_by_triton", autospec=True, side_effect=launch_by_triton
        ) as triton_s:
            plan(grid, operands, numbers)
        launches = driver.launches()
        assert len(launches) == 1
        (by_plan,) = asked
        num_compiled = len(driver.compiled)
        _scale_kernel[grid](*operands, *numbers, **constants)
        found[label] = [triton_s.called, num_compiled, _without_hooks(by_plan) == _without_hooks(asked[-1])]

    call("first", (x, y), (5, 7, 0.5))
    call("again", (x, y), (5, 7, 0.5))
    call("other numbers", (x, y), (6, 7, 0.25), (2, 5))
    call("a number that kernels are not made for", (x, y), (16, 7, 0.25))
    call("of 16", (x, y), (5, 16, 0.5))
    call("of 16 again", (x, y), (5, 16, 0.5))
    call("one", (x, y), (5, 1, 0.5))
    call("one again", (x, y), (5, 1, 0.5))
    call("wide", (x, y), (2**31, 7, 0.5))
    call("wide again", (x, y), (2**31, 7, 0.5))
    call("wide stride", (x, y), (5, 2**31, 0.5))
    call("negative", (x, y), (-5, 7, 0.5))
    call("wide and negative", (x, y), (-(2**31) - 1, 7, 0.5))
    call("integer for a float", (x, y), (5, 7, 3))
    call("integer for a float again", (x, y), (5, 7, 3))
    call("no tensor", (x, None), (5, 7, 0.5))
    call("no tensor again", (x, None), (5, 7, 0.5))
    call("other dtype", (x, y.half()), (5, 7, 0.5))
    call("other dtype again", (x, y.half()), (5, 7, 0.5))
    call("not aligned", (x[1:], y), (5, 7, 0.5))
    call("not aligned again", (x[1:], y), (5, 7, 0.5))
    call("the other not aligned", (x, y[1:]), (5, 7, 0.5))
    call("aligned once more", (x[4:], y[8:]), (5, 7, 0.5))
    seen: list[str] = []
    for label, hooks in (
        ("enter hook", knobs.runtime.launch_enter_hook),
        ("exit hook", knobs.runtime.launch_exit_hook),
    ):
        hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
        hooks.add(hook)
        call(label, (x, y), (5, 7, 0.5))
        hooks.remove(hook)
    assert seen == ["_scale_kernel"] * 4, seen  # once by the plan, once by Triton, for either hook
    with mock.patch.object(knobs.runtime, "launch_enter_hook", mock.Mock(return_value=None)):
        call("replaced hook", (x, y), (5, 7, 0.5))
    run = JITFunction.run
    with mock.patch.object(JITFunction, "run", lambda kernel, *args, **kwargs: run(kernel, *args, **kwargs)):
        call("replaced run", (x, y), (5, 7, 0.5))
    _scale_kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    call("hook before a run", (x, y), (5, 7, 0.5))
    _scale_kernel.pre_run_hooks.clear()
    with mock.patch.object(plan._known[int, int, float].kernels[(torch.float32,) * 2 + (-1, 7)], "device", 1):
        call("another device is the current one", (x, y), (5, 7, 0.5))
    call("at last", (x, y), (5, 7, 0.5))
    return found


def other_launchers(driver: NullDriver) -> dict[str, Any]:
    """Launches by a launcher that has nothing but `__call__`, as Triton 3.6 and AMD's have: as many as by Triton. And
    with tensor maps made from two arguments, as Triton 3.7 makes them.
    """
    from triton.backends.nvidia import driver as triton_driver

    from bert_fast.triton import _launch_plan

    make_map = triton_driver.make_tensordesc_arg
    third = (None,) * (make_map.__code__.co_argcount - 2)

    def of_two(arg: Any, metadata: Any) -> Any:
        return make_map(arg, metadata, *third)

    def of_three(arg: Any, metadata: Any, _: Any) -> Any:
        return make_map(arg, metadata, *third)

    class Bare(_launch_plan._Ready):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._is_bare = False

    found = {}
    for label, ready, maps in (
        ("bare", _launch_plan._Ready, make_map),
        ("called", Bare, make_map),
        ("two", _launch_plan._Ready, of_two),
        ("three", _launch_plan._Ready, of_three),
    ):
        with (
            mock.patch.object(_launch_plan, "_Ready", ready),
            mock.patch.object(triton_driver, "make_tensordesc_arg", maps),
        ):
            _launch_plan.launch_plan.cache_clear()
            step = make_step("BertForTokenClassification", "bf16", num_layers=1)
            for part in PARTS * 2:
                step.run(part)
            driver.reset()
            for part in PARTS:
                step.run(part)
            found[label] = [(one.kernel, one.grid, one.threads, one.shared_bytes) for one in driver.launches()]
    first, *others = found.values()
    return {"same": others == [first] * 3, "launches": len(first), "refusals": driver.refusals}


PLAN_SCENARIOS = {one.__name__: one for one in (plans_ask_for_the_same, who_launches, other_launchers)}
