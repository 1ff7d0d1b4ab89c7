"""Takes the place of Triton's launches: kernels are compiled for an NVIDIA processor, and their PTX is run here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from tools.witness.bulk_copies import TensorMap
from tools.witness.instructions import compile_instruction
from tools.witness.machine import Machine
from tools.witness.memory import Global
from tools.witness.ptx import parse


@dataclass
class Witness:
    """What was run: names of kernels, in order; machines by the compiled kernel."""

    capability: int
    kernels: list[str] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    memory: Global = field(default_factory=Global)
    boxes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_programs: int = 0


@contextmanager
def witness(capability: int = 90) -> Iterator[Witness]:
    """Within the context Triton's kernels, launched on CPU tensors, are compiled for sm_<capability> and run by PTX.

    Launchers choose as they would on that processor.
    """
    from triton.runtime.jit import JITFunction

    from bert_fast.triton._launch import assume_architecture

    found = Witness(capability)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _run(found, kernel, args, grid, kwargs)

    with assume_architecture(f"sm_{capability}"), mock.patch.object(JITFunction, "run", run):
        yield found


def _run(found: Witness, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.aot.launches import launch_of

    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    launch = launch_of(kernel, *args, grid=grid, warmup=False, **dict(kwargs))
    machine = found.machines.get(launch.identity)
    if machine is None:
        index = launch.kernel.arg_names.index
        source = ASTSource(
            fn=launch.kernel, signature=launch.signature,
            constexprs={(index(name),): value for name, value in launch.constants.items()},
            attrs={(index(name),): [["tt.divisibility", 16]] for name in launch.divisible_by_16},
        )  # fmt: skip
        target = GPUTarget("cuda", found.capability, 32)
        compiled = triton.compile(source, target=target, options=launch.options)
        machine = Machine(parse(compiled.asm["ptx"]), int(compiled.metadata.shared), found.memory, compile_instruction)
        found.machines[launch.identity] = machine
        found.boxes[launch.identity] = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    boxes = found.boxes[launch.identity]
    operands = [values.get(name) for name in kernel.arg_names if launch.signature[name] != "constexpr"]
    _set_parameters(machine, operands, boxes)
    if callable(grid):
        grid = grid(values)
    programs = [*grid, 1, 1][:3]
    machine.grid = list(programs)
    found.kernels.append(kernel.__name__)
    with np.errstate(all="ignore"):
        for z in range(programs[2]):
            for y in range(programs[1]):
                for x in range(programs[0]):
                    machine.run((x, y, z))
                    found.num_programs += 1


def _set_parameters(machine: Machine, operands: list[Any], windows: list[dict[str, Any]]) -> None:
    """windows: what the compiler says of the boxes of tensor descriptors, in their order."""
    places, boxes = iter(machine.kernel.parameters.values()), iter(windows)
    machine.parameters[:] = 0
    machine.maps.clear()

    def put(number: Any, dtype: Any) -> None:
        at, size = next(places)
        machine.parameters[at : at + size] = np.array([number], dtype).view(np.uint8)[:size]

    for operand in operands:
        if isinstance(operand, torch.Tensor):
            put(machine.memory.address_of(operand), np.uint64)
        elif isinstance(operand, float):
            put(operand, np.float32)
        elif isinstance(operand, tuple):
            for number in operand:
                put(number, np.int64)
        elif hasattr(operand, "block_shape"):
            at, _ = next(places)
            machine.maps[at] = _tensor_map(machine.memory.address_of(operand.base), operand, next(boxes))
            for number in (*operand.shape, *operand.strides):
                put(number, np.int64)
        else:
            put(int(operand), np.int64)


def _tensor_map(address: int, descriptor: Any, box: dict[str, Any]) -> TensorMap:
    size = box["elem_size"]
    rows, columns = descriptor.shape
    return TensorMap(
        address, rows, columns, descriptor.strides[0] * size, tuple(box["block_size"]), size, box["swizzle"]
    )
