"""One program (CTA) after another: registers of all threads at once, control flow, what is still to come.

All threads take a step together; where branches part them, those that are behind go first until all are together again.
What a device does later it does here as late as it may: matrix products and copies to shared memory that run by
themselves are carried out when somebody waits for them, and read their operands only then. So a register or a buffer
that is used again too early makes a wrong result here, where on a device it makes one now and then.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.witness.memory import Fault, Global, Shared
from tools.witness.ptx import Instruction, Kernel

Array = NDArray[Any]
Mask = Array | None
Run = Callable[[Mask], None]
Compiler = Callable[["Machine", Instruction], Run]
_DTYPES = {1: np.bool_, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_END = 1 << 30
_MOST_STEPS = 20_000_000
_DONE = ("ret", "exit")


class Machine:
    """Runs programs of one kernel.

    registers: name -> its value in all threads, as unsigned bits (bool of a predicate). threads, lanes, warps: numbers.
    """

    def __init__(self, kernel: Kernel, shared_bytes: int, memory: Global, compiler: Compiler) -> None:
        """compiler: makes of a machine and an instruction what carries it out."""
        self.kernel, self.memory = kernel, memory
        self.threads = np.arange(kernel.threads, dtype=np.uint32)
        self.lanes, self.warps = self.threads % 32, (self.threads // 32).astype(np.int32)
        self.registers: dict[str, Array] = {}
        self.parameters = np.zeros(max((at + size for at, size in kernel.parameters.values()), default=0), np.uint8)
        self.maps: dict[int, Any] = {}  # tensor maps, by the offset of their parameter
        self.program, self.grid = [0, 0, 0], [1, 1, 1]
        self._shared_bytes = shared_bytes
        self.shared = Shared(shared_bytes)
        self.products: list[list[list[Run]]] = []
        self.copies: list[list[Run]] = []
        self.stores: list[list[Run]] = []
        self.barriers: dict[int, Any] = {}  # mbarriers, by address
        self._steps = [(one, compiler(self, one)) for one in kernel.instructions]
        self._targets = {
            index: kernel.labels[one.operands[0]]
            for index, one in enumerate(kernel.instructions)
            if one.parts[0] == "bra"
        }

    def register(self, name: str) -> Array:
        """The bits of a register in all threads."""
        found = self.registers.get(name)
        if found is None:
            found = self.registers[name] = np.zeros(len(self.threads), _DTYPES[self.kernel.width(name)])
        return found

    def guard(self, one: Instruction) -> Mask:
        """Which threads the predicate admits; None for all."""
        if not one.guard:
            return None
        bits = self.register(one.guard.lstrip("!"))
        return ~bits if one.guard[0] == "!" else bits

    def run(self, program: tuple[int, int, int]) -> None:
        """Runs one program to its end."""
        self.program = list(program)
        self.shared = Shared(self._shared_bytes)
        self.products = [[[]] for _ in range(-(-len(self.threads) // 128))]
        self.copies, self.stores = [[]], [[]]
        self.barriers = {}
        self._run_together(0)
        if any(group for groups in self.products for group in groups) or any(self.copies + self.stores):
            raise Fault("the program ends while products or copies are in flight")

    def _run_together(self, at: int) -> None:
        """From an instruction on, as long as all threads are together."""
        steps = self._steps
        count = 0
        while at < len(steps):
            count += 1
            if count > _MOST_STEPS:
                raise Fault(f"no end after {_MOST_STEPS} instructions")
            one, run = steps[at]
            mask = self.guard(one)
            if mask is not None:
                if not mask.any():
                    at += 1
                    continue
                if mask.all():
                    mask = None
            if at in self._targets:
                if mask is None:
                    at = self._targets[at]
                    continue
                at = self._run_apart(np.where(mask, self._targets[at], at + 1))
                continue
            if one.opcode in _DONE:
                if mask is None:
                    return
                at = self._run_apart(np.where(mask, _END, at + 1))
                continue
            self._take(one, run, mask)
            at += 1

    def _take(self, one: Instruction, run: Run, mask: Mask) -> None:
        try:
            run(mask)
        except Fault as fault:
            raise Fault(f"{self.kernel.name}, line {one.line}: {one.opcode}: {fault}") from None

    def _run_apart(self, at: Array) -> int:
        """at [threads]: where each goes on; returns where all are together."""
        blocked = np.zeros(len(at), bool)
        for _ in range(_MOST_STEPS):
            live = at < _END
            if not live.any():
                return _END
            free = live & ~blocked
            if not free.any():
                self.shared.interval += 1
                at[blocked] += 1
                blocked[:] = False
                continue
            here = int(at[free].min())
            mask = free & (at == here)
            if mask.all():
                return here
            one, run = self._steps[here]
            guard = self.guard(one)
            taken = mask if guard is None else mask & guard
            if here in self._targets:
                at[mask] = here + 1
                at[taken] = self._targets[here]
            elif one.opcode in _DONE:
                at[mask] = here + 1
                at[taken] = _END
            elif one.opcode.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")):
                blocked |= taken
            else:
                if taken.any():
                    self._take(one, run, taken)
                at[mask] = here + 1
        raise Fault("no end: threads wait for each other")
