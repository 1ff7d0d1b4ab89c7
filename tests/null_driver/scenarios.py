"""What the tests run over the null driver, each in a process of its own.

    python -m tests.null_driver.scenarios NAME [DEVICE] [--empty-kernels]

Writes one line of JSON. A process has one device, and bert_fast once imported has the answers of one kind of device.
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tests.null_driver.layer_scenarios import LAYER_SCENARIOS
from tests.null_driver.plan_scenarios import PLAN_SCENARIOS
from tests.null_driver.product_scenarios import PRODUCT_SCENARIOS
from tests.null_driver.program_faults import FAULT_SCENARIOS
from tests.null_driver.program_scenarios import PROGRAM_SCENARIOS
from tests.null_driver.rehearsal_scenarios import REHEARSAL_SCENARIOS
from tests.null_driver.scratch_scenarios import SCRATCH_SCENARIOS
from tests.null_driver.sequence_scenarios import SEQUENCE_SCENARIOS
from tools.null_driver import table
from tools.null_driver.counting import counted_operators, counted_syncs
from tools.null_driver.driver import NullDriver, start
from tools.null_driver.saved_bytes import layer_list
from tools.null_driver.steps import PARTS, Step, inputs_of, make_step

# Batches that between them need every kernel: longest sequences of up to 32, 64, 128 and more tokens, each with padding
# and without. Their numbers of tokens and of sequences are no multiples of 16, for which Triton would make others.
WARM = (
    (24, 20, 17, 13), (40, 20, 17, 13), (80, 20, 17, 13), (200, 20, 17, 13),
    (25,) * 3, (41,) * 3, (81,) * 3, (201,) * 3,
)  # fmt: skip
CHANGED = (
    (31, 30, 29, 28), (17, 29, 19, 23), (64, 64, 64, 64), (33, 64, 1, 20), (65, 2, 3, 4), (128, 127, 126, 125),
    (112, 96, 16, 64), (128, 128, 128, 128), (129, 1, 1, 1), (512, 512, 512, 512), (512, 3, 511, 77), (256, 255),
    (99, 98, 97, 96, 95, 94, 93), (32, 16, 32), (16,) * 16, (96,), (100,), (9,) * 32,
)  # fmt: skip


@triton.jit
def _fill_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


@triton.jit
def _count_kernel(x_ptr, n):
    tl.store(x_ptr, n)


@triton.jit
def _sort_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.sort(tl.load(x_ptr + offs)))


def launches(driver: NullDriver) -> dict[str, Any]:
    """The table of all steps; what rose, was refused."""
    found = table.measure(driver)
    return {"risen": table.risen(found, table.read()), "rows": table.rows(found), "refusals": driver.refusals}


def shapes(driver: NullDriver) -> dict[str, Any]:
    """Kernels compiled by steps of other batches, once every regime was seen."""
    compiled: dict[str, list[str]] = {}
    for name, precision in (
        ("BertForMaskedLM", "autocast"),
        ("BertForTokenClassification", "bf16"),
        ("BertModel", "fp32"),
    ):
        step = make_step(name, precision)
        for lengths in WARM:
            _run(step, name, lengths)
        for lengths in CHANGED:
            driver.reset()
            _run(step, name, lengths)
            compiled[f"{name} {precision} {lengths}"] = [*driver.compiled]
    return {"compiled": compiled, "refusals": driver.refusals}


# Our models in either precision, padded and packed, and transformers' in their place.
WARMED = (
    ("BertForSequenceClassification", "autocast", "bert_fast"),
    ("BertForTokenClassification", "bf16", "bert_fast"),
    ("BertForMaskedLM", "autocast", "bert_fast"),
    ("BertForPreTraining", "bf16", "bert_fast"),
    ("BertForQuestionAnswering", "autocast", "bert_fast"),
    ("BertForMultipleChoice", "bf16", "bert_fast"),
    ("BertLMHeadModel", "autocast", "bert_fast"),
    ("BertModel", "fp32", "bert_fast"),
    ("BertForMaskedLM", "bf16", "packed"),
    ("BertForTokenClassification", "autocast", "packed"),
    ("BertForTokenClassification", "autocast", "fused"),
    ("BertForPreTraining", "autocast", "fused"),
    ("BertForQuestionAnswering", "bf16", "fused"),
)
SYNCS = (
    ("BertModel", "bf16", "bert_fast"),
    ("BertModel", "bf16", "packed"),
    ("BertForTokenClassification", "autocast", "bert_fast"),
    ("BertForTokenClassification", "autocast", "packed"),
    ("BertForTokenClassification", "autocast", "fused"),
    ("BertForSequenceClassification", "bf16", "fused"),
    ("BertForQuestionAnswering", "bf16", "bert_fast"),
    ("BertForMaskedLM", "bf16", "bert_fast"),
    ("BertForMaskedLM", "bf16", "packed"),
    ("BertForMaskedLM", "bf16", "fused"),
)
# Beside `CHANGED`: a single token, odd numbers of tokens and multiples of 16, many sequences, large batches.
REAL = (*CHANGED, (1,), (1, 1), (2, 1), (7,) * 9, (16,) * 5, (48,), (13,) * 80, (511,) * 4, (512, 500, 300))


def warm_up(driver: NullDriver) -> dict[str, Any]:
    """Kernels compiled by `warm_up`, then by training and evaluation on real batches."""
    import bert_fast

    warmed: dict[str, int] = {}
    compiled: dict[str, list[str]] = {}
    for name, precision, kind in WARMED:
        _forget()
        step = make_step(name, precision, kind="bert_fast" if kind == "packed" else kind)
        driver.reset()
        bert_fast.warm_up(
            step.model,
            optimizer=step.optimizer.__self__,  # type: ignore[attr-defined]
            autocast_dtype=torch.bfloat16 if precision == "autocast" else None,
            max_tokens=2048,
        )
        case = f"{name} {precision} {kind}"
        warmed[case] = len(driver.compiled)
        for lengths in REAL:
            driver.reset()
            step.inputs = inputs_of(name, lengths)
            if kind == "packed":
                step.inputs = _packed(step.inputs, lengths)
            for part in PARTS:
                step.run(part)
            step.model.eval()
            with torch.no_grad():
                step.forward()
                step.inputs = {one: t for one, t in step.inputs.items() if "label" not in one and "pos" not in one}
                step.forward()
            step.model.train()
            compiled[f"{case} {lengths}"] = [*driver.compiled]
    return {"warmed": warmed, "compiled": compiled, "refusals": driver.refusals}


def syncs(driver: NullDriver) -> dict[str, list[list[str]]]:
    """What the host waited for in forward, backward and the optimizer, of padded and of packed input."""
    found = {}
    for name, precision, kind in SYNCS:
        step = make_step(name, precision, kind="bert_fast" if kind == "packed" else kind)
        for lengths in WARM[:2]:  # once more: what is only made once is not counted
            step.inputs = inputs_of(name, lengths)
            if kind == "packed":
                step.inputs = _packed(step.inputs, lengths)
            each = []
            for part in PARTS:
                step.prepare(part)
                with counted_syncs() as waited:
                    getattr(step, part)()
                each.append(waited)
        found[f"{name} {precision} {kind}"] = each
    return found


# Inference of our models and of transformers' in their place.
SERVED = (
    ("BertForSequenceClassification", "bf16", "bert_fast"),
    ("BertForTokenClassification", "autocast", "fused"),
    ("BertForMaskedLM", "fp32", "bert_fast"),
)


def batch_invariant(driver: NullDriver) -> dict[str, list[list[int]]]:
    """How many different lists of launches batches of different lengths have, and how many products are the library's.

    As they are, then asked for the same bits.

    Of a launch everything counts that its kernel is compiled for: constants, options, what Triton specializes; but not
    whether sequences come in an order of their own, which says who works on one and enters no number. No
    kernel is compiled or run.
    """
    import bert_fast
    from bert_fast.triton._launch_plan import LaunchPlan
    from bert_fast.triton._programs import Programs

    noted: list[Any] = []

    def note(self: Any, grid: Any, operands: Any, numbers: Any = ()) -> None:
        params = self._kernel.params[len(operands) :]
        of_numbers = [
            (n == 1, n % 16 == 0)
            for n, param in zip(numbers, params, strict=False)
            if isinstance(n, int) and not param.do_not_specialize
        ]
        of_operands = [
            None if t is None else (str(t.dtype), t.data_ptr() % 16 == 0)
            for t, param in zip(operands, self._kernel.params, strict=False)
            if param.name != "order_ptr"
        ]
        constants = sorted((key, str(value)) for key, value in self._constants.items())
        noted.append((self._kernel.__name__, constants, of_operands, of_numbers))
        for t in operands:  # what stands in memory might be no number at all, and ids are asked for
            if t is not None and t.is_floating_point():
                t.nan_to_num_()

    LaunchPlan.__call__ = note  # type: ignore[method-assign,assignment]
    Programs.run = lambda *_: None  # type: ignore[method-assign,assignment]  # which launch without asking plans
    found = {}
    for name, precision, kind in SERVED:
        step = make_step(name, precision, kind=kind)
        step.model.eval()
        counts = []
        for asked in (False, True):
            launched, num_products = set(), 0
            for lengths in REAL:
                step.inputs = inputs_of(name, lengths)
                del step.inputs["labels"]
                noted.clear()
                asking = bert_fast.batch_invariant() if asked else nullcontext()
                with torch.no_grad(), asking, counted_operators() as operators:
                    step.forward()
                launched.add(str(noted))
                num_products += operators.products
            counts.append([len(launched), num_products])
        found[f"{name} {precision} {kind}"] = counts
    return found


def _packed(inputs: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    """The batch without padding."""
    keep = inputs.pop("attention_mask").bool()
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {name: t[keep] for name, t in inputs.items()} | {"cu_seqlens": ends, "max_seqlen": max(lengths)}


def _forget() -> None:
    """As a process is that has launched nothing: kernels are loaded again."""
    from bert_fast.triton._launch_plan import LaunchPlan
    from bert_fast.triton._programs import Programs

    for one in gc.get_objects():
        if type(one) is LaunchPlan:
            one._known.clear()
        elif type(one) is Programs:
            one.forget()
    for name, module in [*sys.modules.items()]:
        if name.startswith("bert_fast.triton."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()


def _run(step: Step, name: str, lengths: tuple[int, ...]) -> None:
    step.inputs = inputs_of(name, lengths)
    for part in PARTS:
        step.run(part)


def compilations(driver: NullDriver) -> list[list[str]]:
    """Kernels compiled as a number that Triton specializes changes."""
    compiled = []
    for n in (5, 6, 16, 32, 1):
        driver.reset()
        _count_kernel[(1,)](torch.zeros(1), n)
        compiled.append([*driver.compiled])
    return compiled


def one_step(driver: NullDriver) -> dict[str, Any]:
    """A step in half precision; one layer, since kernels have to be compiled for each device."""
    _run(make_step("BertForTokenClassification", num_layers=1), "BertForTokenClassification", WARM[0])
    asked = [[one.kernel, *one.grid, one.threads] for one in driver.launches()]
    return {
        "kernels": driver.by_kernel(), "asked": asked, "maps": driver.num_tensor_maps, "refusals": driver.refusals,
    }  # fmt: skip


def refusals(driver: NullDriver) -> dict[str, str]:
    """What each call was answered: "accepted", or the message of the exception or the driver."""
    x = torch.zeros(4096)
    kernel = _fill_kernel[(1,)](x, BLOCK=128)
    utils = triton.runtime.driver.active.utils
    shared = driver.device.shared_bytes

    def launch(
        grid: tuple[int, ...], function: int = kernel.function, threads: int = 128, shared_bytes: int = 0
    ) -> None:
        parameters = (ctypes.c_void_p * 3)()
        x, y, z = (*grid, 1, 1)[:3]
        code = driver.lib.cuLaunchKernel(
            ctypes.c_void_p(function), x, y, z, threads, 1, 1, shared_bytes, None, parameters, None
        )  # fmt: skip
        if code:
            raise RuntimeError(f"code {code}: {driver.refusals[1]}")

    def tensor_map(
        address: int = x.data_ptr(), swizzle: int = 3, dtype: int = 9, box: tuple[int, ...] = (64, 64),
        shape: tuple[int, ...] = (128, 128), strides: tuple[int, ...] = (128, 1), padding: int = 0,
    ) -> None:  # fmt: skip
        try:
            utils.fill_tma_descriptor_tiled(address, swizzle, 2, dtype, box, shape, strides, padding)
        except RuntimeError as error:
            raise RuntimeError(f"{str(error).splitlines()[0]}: {driver.refusals[1]}") from error

    def ask_for_shared(nbytes: int) -> None:
        wanted = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if driver.lib.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), wanted, nbytes):
            raise RuntimeError(driver.refusals[1])

    def launch_after_asking() -> None:
        ask_for_shared(shared)
        launch((1,), shared_bytes=shared)

    calls: dict[str, Callable[[], object]] = {
        "grid": lambda: launch((2**31 - 1, 65535, 65535)),
        "no programs": lambda: launch((0,)),
        "too many programs": lambda: launch((2**31,)),
        "too many rows of programs": lambda: _fill_kernel[(1, 65536)](x, BLOCK=128),
        "too many layers of programs": lambda: _fill_kernel[(1, 1, 65536)](x, BLOCK=128),
        "too many threads": lambda: launch((1,), threads=1056),
        "no function": lambda: launch((1,), function=0),
        "48 KB": lambda: launch((1,), shared_bytes=48 * 1024),
        "shared memory not asked for": lambda: launch((1,), shared_bytes=48 * 1024 + 1),
        "too much shared memory": lambda: ask_for_shared(shared + 1),
        "all shared memory": launch_after_asking,
        "no cubin": lambda: utils.load_binary("_fill_kernel", b"\0" * 64, 0, 0),
        "another kernel": lambda: utils.load_binary("_other_kernel", kernel.asm["cubin"], 0, 0),
        "tensor map": tensor_map,
        "tensor map: address": lambda: tensor_map(address=x.data_ptr() + 8),
        "tensor map: stride": lambda: tensor_map(strides=(129, 1)),
        "tensor map: far stride": lambda: tensor_map(strides=(2**39, 1)),
        "tensor map: box": lambda: tensor_map(box=(257, 64)),
        "tensor map: empty box": lambda: tensor_map(box=(0, 64)),
        "tensor map: swizzle": lambda: tensor_map(box=(64, 128)),
        "tensor map: row": lambda: tensor_map(box=(64, 4), swizzle=0),
        "tensor map: rank": lambda: tensor_map(box=(1,) * 5, shape=(1,) * 5, strides=(1,) * 5, swizzle=0),
        "tensor map: size": lambda: tensor_map(shape=(0, 128)),
        "tensor map: type": lambda: tensor_map(dtype=16),
        "tensor map: NaN": lambda: tensor_map(dtype=1, padding=1),
    }
    return {name: _answer(call) for name, call in calls.items()}


def _answer(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, OverflowError) as error:
        return str(error)
    return "accepted"


def resources(driver: NullDriver) -> list[dict[str, Any]]:
    """Registers and local memory of kernels, by the null driver and by cuobjdump."""
    import triton.backends.nvidia

    tool = Path(next(iter(triton.backends.nvidia.__path__))) / "bin" / "cuobjdump"
    found = []
    for kernel in (
        _fill_kernel[(1,)](torch.zeros(128), BLOCK=128),
        _fill_kernel[(1,)](torch.zeros(4096), BLOCK=4096),
        _sort_kernel[(1,)](torch.zeros(1024), BLOCK=1024, num_warps=1, maxnreg=32),
    ):
        listing = subprocess.run(
            [tool, "-res-usage", kernel.metadata_group[f"{kernel.name}.cubin"]],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        theirs = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", listing)}
        found.append({"ours": {"REG": kernel.n_regs, "STACK": 4 * kernel.n_spills}, "theirs": theirs})
    return found


def saved_bytes(driver: NullDriver) -> list[list[Any]]:
    """What a layer of BERT-base keeps for backward in bf16 of 512 tokens: names, shapes, bytes."""
    return [[name, list(tensor.shape), tensor.nbytes] for name, tensor in layer_list(1, 512)]


SCENARIOS = (
    PLAN_SCENARIOS
    | LAYER_SCENARIOS
    | PRODUCT_SCENARIOS
    | PROGRAM_SCENARIOS
    | FAULT_SCENARIOS
    | SCRATCH_SCENARIOS
    | SEQUENCE_SCENARIOS
    | REHEARSAL_SCENARIOS
    | {
        one.__name__: one
        for one in (
            launches,
            shapes,
            warm_up,
            syncs,
            batch_invariant,
            compilations,
            one_step,
            refusals,
            resources,
            saved_bytes,
        )
    }
)


def main() -> None:
    name, *options = sys.argv[1:]
    device = [one for one in options if one != "--empty-kernels"]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print(json.dumps(SCENARIOS[name](start(*device, empties_kernels=device != options))))


if __name__ == "__main__":
    main()
