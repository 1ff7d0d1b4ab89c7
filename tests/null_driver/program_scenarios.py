"""What the tests of programs in C++ run over the null driver, as `scenarios.py`."""

import math
import random
from typing import Any
from unittest import mock

import torch

from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import PARTS, inputs_of, make_step

NUM_SIZES = 50
STEPS = (
    ("BertForPreTraining", "autocast", ((24, 20, 17, 13), (70, 3, 41), (130, 20, 17))),
    ("BertForSequenceClassification", "bf16", ((130, 20, 17, 13), (16,) * 4)),
    ("BertForQuestionAnswering", "fp32", ((64, 32, 16, 16),)),
)


class _Asked:
    """Each launch of a plan once more by a program of this one launch, and both compared."""

    def __init__(self, driver: NullDriver) -> None:
        from bert_fast.triton import _launch_plan

        self._driver, self._plans = driver, _launch_plan
        self._run = _launch_plan.LaunchPlan.__call__
        self._programs: dict[Any, Any] = {}
        self.compared: dict[str, int] = {}
        self.with_shared: set[str] = set()  # kernels
        self.wrong: list[str] = []
        driver.note_parameters()

    def __call__(self, plan: Any, grid: Any, operands: Any, numbers: Any = ()) -> None:
        self._run(plan, grid, operands, numbers)
        if self._plans.recorders:  # comes here again
            return
        ready = plan.ready(operands, numbers)
        if ready is None:
            return  # with a number of more than 32 bits
        constants = tuple(n for n in numbers if type(n) is float)
        key = (plan, ready, constants, len(grid))
        arguments, program = self._one_launch(plan, grid, operands, numbers, has_program=key in self._programs)
        if program is not None:
            from bert_fast.triton._native_program import native_program

            self._programs[key] = native_program(program, [ready])
        name = plan._kernel.__name__
        native = self._programs[key]
        if native is None:
            self.wrong.append(f"{name}: no program")
            return
        self._driver.reset()
        self._run(plan, grid, operands, numbers)
        outputs = native.run(operands, arguments)
        launches = self._driver.launches()
        self.compared[name] = self.compared.get(name, 0) + 1
        self.with_shared |= {one.kernel for one in launches if one.shared_bytes}
        if outputs != () or len(launches) != 2 or launches[0] != launches[1] or not launches[0].parameters:
            self.wrong.append(f"{name}: {launches}, outputs {outputs}")

    def _one_launch(self, plan: Any, grid: Any, operands: Any, numbers: Any, *, has_program: bool) -> Any:
        """The call's integers and, unless there is one, the program that takes them."""
        from bert_fast.triton._program import Expression, Launch, Program, Step, Window

        arguments: list[int] = []
        expressions = [Expression("constant", 0)]

        def number(value: int) -> int:
            expressions.append(Expression("argument", len(arguments)))
            arguments.append(value)
            return len(expressions) - 1

        places = tuple(map(number, grid))
        given = tuple((True, number(n)) if type(n) is int else (False, n) for n in numbers)
        windows = tuple(
            Window(place, *map(number, (*operands[place].shape, operands[place].stride(0))), tile)
            for place, tile in enumerate(plan.windows)
            if tile is not None and operands[place] is not None
        )
        if has_program:
            return tuple(arguments), None
        slots = tuple(None if one is None else (place, 0) for place, one in enumerate(operands))
        launch = Launch(plan, places, slots, given, windows)
        count = len(operands)
        return tuple(arguments), Program(count, count, tuple(expressions), (), (Step(launch, ()),), ())


def programs_ask_for_the_same(driver: NullDriver) -> dict[str, Any]:
    """How many launches of whole steps were made by programs as well, by kernel, and those that differ in any byte."""
    return _compare_steps(driver, STEPS, num_layers=2)


def programs_of_whole_kernels(driver: NullDriver) -> dict[str, Any]:
    """As above, of the step of `scenarios.one_step`, whose kernels others compile with their bodies."""
    return _compare_steps(driver, (("BertForTokenClassification", "autocast", ((24, 20, 17, 13),)),), num_layers=1)


def _compare_steps(driver: NullDriver, steps: Any, num_layers: int) -> dict[str, Any]:
    import bert_fast  # noqa: F401  with the answers of a GPU
    from bert_fast.triton._launch_plan import LaunchPlan

    asked = _Asked(driver)
    with mock.patch.object(LaunchPlan, "__call__", lambda plan, *rest: asked(plan, *rest)):
        for name, precision, batches in steps:
            step = make_step(name, precision, num_layers=num_layers)
            for lengths in batches:
                step.inputs = inputs_of(name, lengths)
                for part in PARTS:
                    step.run(part)
    return {
        "compared": asked.compared, "wrong": asked.wrong[:3], "with shared memory": sorted(asked.with_shared),
        "refusals": driver.refusals,
    }  # fmt: skip


def programs_of_any_size(driver: NullDriver) -> dict[str, Any]:
    """As above, of single kernels at random numbers of rows: one program for as many of them as their kernel is for."""
    from bert_fast.ops import dropout_add_layer_norm
    from bert_fast.triton import _gemm
    from bert_fast.triton._launch_plan import LaunchPlan

    asked, rng, maps = _Asked(driver), random.Random(5), 0
    norm = torch.nn.Parameter(torch.ones(768, dtype=torch.bfloat16))
    weight, bias = torch.zeros(768, 3072, dtype=torch.bfloat16), torch.zeros(3072, dtype=torch.bfloat16)
    with mock.patch.object(LaunchPlan, "__call__", lambda plan, *rest: asked(plan, *rest)):
        for _ in range(NUM_SIZES):
            x = torch.zeros(rng.randint(1, 5000), 768, dtype=torch.bfloat16, requires_grad=True)
            y = dropout_add_layer_norm(x, x, norm, norm)
            y.backward(torch.zeros_like(y))
            _gemm.product_activation(x.detach(), weight, bias, "gelu", True)
            maps += driver.num_tensor_maps
    return {
        "compared": asked.compared, "wrong": asked.wrong[:3], "programs": len(asked._programs), "maps": maps,
        "refusals": driver.refusals,
    }  # fmt: skip


def programs_in_one_block(driver: NullDriver) -> dict[str, Any]:
    """A program of memory and two kernels, whose operands lie in that memory at offsets, at random numbers of rows.

    Its launches are compared with those of plans for views of the memory that it has used. One of the kernels takes
    matrices by tensor maps.
    """
    import bert_fast  # noqa: F401  with the answers of a GPU
    from bert_fast.reference.dropout_add_layer_norm import DropoutAddLayerNorm
    from bert_fast.triton import _gemm, dropout_add_layer_norm
    from bert_fast.triton._launch_plan import LaunchPlan
    from bert_fast.triton._native_program import native_program
    from bert_fast.triton._program import Empty, Expression, Launch, Program, Step, Window

    bf16 = torch.bfloat16
    norm, weight, bias = torch.ones(768, dtype=bf16), torch.zeros(768, 3072, dtype=bf16), torch.zeros(3072, dtype=bf16)
    run, rng = LaunchPlan.__call__, random.Random(7)
    driver.note_parameters()

    def launched(x: torch.Tensor, block: torch.Tensor | None) -> tuple[list[Any], torch.Tensor]:
        """Calls of plans with all that they make in a block, which is made unless it is given."""
        calls: list[Any] = []
        offsets = [0]
        rows = len(x)
        sizes = {torch.float32: 4, bf16: 2}
        made = block if block is not None else torch.empty(rows * 20_000, dtype=torch.uint8)

        def empty(*shape: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
            shape = shape[0] if isinstance(shape[0], (tuple, torch.Size)) else shape
            start, nbytes = offsets[-1], sizes[dtype] * math.prod(shape)
            offsets.append(start + -(-nbytes // 512) * 512)
            return made[start : start + nbytes].view(dtype).view(shape)

        def empty_like(like: torch.Tensor) -> torch.Tensor:
            return empty(*like.shape, dtype=like.dtype)

        def new_empty(like: torch.Tensor, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
            return empty(*(shape if isinstance(shape, tuple) else (shape,)), dtype=dtype or like.dtype)

        def note(plan: Any, grid: Any, operands: Any, numbers: Any = ()) -> None:
            calls.append((plan, grid, operands, numbers))
            run(plan, grid, operands, numbers)

        with (
            mock.patch.object(torch, "empty", empty),
            mock.patch.object(torch, "empty_like", empty_like),
            mock.patch.object(torch.Tensor, "new_empty", new_empty),
            mock.patch.object(LaunchPlan, "__call__", note),
        ):
            record = DropoutAddLayerNorm(x, x, None, norm, norm, 1e-12, 0.0, None, None, 0, "input")
            _, h, *_ = dropout_add_layer_norm.dropout_add_layer_norm_fwd(record)
            _gemm.product_activation(h, weight, bias, "gelu", True)
        return calls, made

    def program_of(calls: list[Any], inputs: list[torch.Tensor], block: torch.Tensor) -> tuple[Any, list[int], Any]:
        """The program, its integers, and what chose it."""
        expressions, arguments = list[Any](), list[int]()

        def number(value: int) -> int:
            expressions.append(Expression("argument", len(arguments)))
            arguments.append(value)
            return len(expressions) - 1

        def operand(tensor: torch.Tensor | None) -> tuple[int, int] | None:
            if tensor is None:
                return None
            for slot, one in enumerate((*inputs, block)):
                if 0 <= tensor.data_ptr() - one.data_ptr() < one.nbytes:
                    return slot, number(tensor.data_ptr() - one.data_ptr())
            raise AssertionError

        steps = [Step(Empty(len(inputs), (number(block.nbytes),), torch.uint8), ())]
        readies = []
        for plan, grid, operands, numbers in calls:
            windows = tuple(
                Window(place, *map(number, (*operands[place].shape, operands[place].stride(0))), tile)
                for place, tile in enumerate(plan.windows)
                if tile is not None and operands[place] is not None
            )
            given = tuple((True, number(n)) if type(n) is int else (False, n) for n in numbers)
            places, slots = tuple(map(number, grid)), tuple(map(operand, operands))
            steps.append(Step(Launch(plan, places, slots, given, windows), ()))
            readies.append(plan.ready(operands, numbers))
        slot = len(inputs)
        program = Program(slot, slot + 1, tuple(expressions), (), tuple(steps), (slot,))
        return (program, readies), arguments, tuple(readies)

    programs: dict[Any, Any] = {}
    wrong: list[str] = []
    compared, bad_stride = 0, ""
    for _ in range(NUM_SIZES):
        rows = rng.randint(70, 5000)
        x = torch.zeros(rows, 768, dtype=bf16)
        inputs = [x, norm, weight, bias]
        calls, block = launched(x, None)
        (form, readies), arguments, key = program_of(calls, inputs, block)
        if key not in programs:
            programs[key] = native_program(form, readies)
        native = programs[key]
        assert native is not None
        driver.reset()
        outputs = native.run(inputs, tuple(arguments))
        if outputs is None:
            wrong.append(f"{rows} rows: refused")
            continue
        launched(x, outputs[0])
        launches = driver.launches()
        half = len(launches) // 2
        compared += half
        if len(launches) != 2 * len(calls) or launches[:half] != launches[half:]:
            wrong.append(f"{rows} rows: {launches}")
        if not bad_stride and calls[-1][0]._kernel.__name__ == "_gemm_kernel":
            place = next(step.what for step in form.steps[::-1] if step.what.windows).windows[0].row_stride
            argument = form.expressions[place].a
            driver.reset()
            try:
                native.run(inputs, (*arguments[:argument], 129, *arguments[argument + 1 :]))
            except RuntimeError as error:
                bad_stride = f"RuntimeError: {error}"
            driver.reset()
    return {
        "compared": compared, "wrong": wrong[:3], "programs": len(programs), "bad stride": bad_stride,
        "refusals": driver.refusals,
    }  # fmt: skip


PROGRAM_SCENARIOS = {
    one.__name__: one
    for one in (
        programs_ask_for_the_same,
        programs_of_whole_kernels,
        programs_of_any_size,
        programs_in_one_block,
    )
}
