"""Reads what callgrind wrote, and leaves out the arithmetic that the CPU does for a GPU."""

import re
from collections import Counter
from pathlib import Path

Function = tuple[str, str]  # the object's file name, the function's name
_NAMED = re.compile(r"(c?)(ob|fn)=\((\d+)\)(?: (.*))?")
_TRIGGER = re.compile(r"desc: Trigger: Client Request: (.*)")

# By name, in any object. Callbacks over `char**` are the loops of element-wise and reducing operators, functions with
# composite accessors sort.
ARITHMETIC = re.compile(
    r"at::native::(AVX2|AVX512|DEFAULT)::|at::vec::|function_ref<void \(char\*\*|vectorized_|cascade_sum"
    r"|KernelImpl|_kernel_impl|cpu_kernel|_serial_kernel|index_select_out_cpu|CompositeRandomAccessor"
    r"|RowwiseMoments|parallel_for|cpublas|gemm|mkldnn|dnnl|^mkl_|^Sleef_"
    r"|^(__)?mem(cpy|set|move)(_|$)"
)


def label_of(path: Path) -> str | None:
    """Returns the name that the dump was given, None for what callgrind writes at its end."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := _TRIGGER.match(line):
                return found[1]
            if line.startswith("fn="):
                break
    return None


def costs(path: Path) -> Counter[Function]:
    """Returns instructions by function, without those of the functions that it calls."""
    names: dict[str, dict[str, str]] = {"ob": {}, "fn": {}}
    current = {"ob": "", "fn": ""}
    found: Counter[Function] = Counter()
    is_call = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            first = line[0]
            if first.isdigit() or first in "+-*":
                if not is_call:  # the line after calls= is what the called function cost
                    found[current["ob"], current["fn"]] += int(line.split()[-1])
                is_call = False
            elif line.startswith("calls="):
                is_call = True
            elif named := _NAMED.match(line):
                called, kind, number, name = named.groups()
                if name is not None:
                    names[kind][number] = name.rsplit("/", 1)[-1] if kind == "ob" else name
                if not called:
                    current[kind] = names[kind].get(number, "?")
    return found


def is_arithmetic(function: Function) -> bool:
    """Whether a function of PyTorch or of a library below it computes values of tensors, which a GPU would do."""
    return not function[0].startswith("_native") and ARITHMETIC.search(function[1]) is not None


def host_instructions(path: Path) -> int:
    """Returns the instructions in a dump that are not arithmetic."""
    return sum(number for function, number in costs(path).items() if not is_arithmetic(function))
