"""Reads PTX as Triton's compiler writes it: one kernel, its parameters, and its instructions in order.

Source: NVIDIA, "PTX ISA", version 9.0.
"""

import re
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"(?:@(!?[%\w$.]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr[^,\n]*?)?\s+(\w+)(?:\[(\d+)\])?\s*[,\n)]")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([%\w$]+)(?:<\d+>)?((?:\s*,\s*[%\w$]+)*)")
_SIZES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Instruction:
    """guard: the predicate that decides whether a thread executes it, perhaps with "!", or "". line: in the text."""

    opcode: str
    operands: tuple[str, ...]
    guard: str
    line: int

    @property
    def parts(self) -> list[str]:
        """The opcode and its modifiers."""
        return self.opcode.split(".")


@dataclass
class Kernel:
    """name of each parameter -> (offset, bytes); register names or their prefixes -> bytes (1 of a predicate)."""

    name: str
    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: dict[str, tuple[int, int]]
    registers: dict[str, int] = field(default_factory=dict)

    def width(self, register: str) -> int:
        """Bytes of a register; 1 of a predicate."""
        found = self.registers.get(register)
        return self.registers[register.rstrip("0123456789")] if found is None else found


def _split(text: str) -> tuple[str, ...]:
    """Operands, which commas part that are in no brackets."""
    found, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*found, last) if last else tuple(found)


def _bytes_of(kind: str) -> int:
    return _SIZES[kind if kind == "pred" else kind.lstrip("bufs")]


def parse(text: str) -> Kernel:
    """The kernel of a module that holds one.

    Raises:
        ValueError: there is none.
    """
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\n?\)", text, re.DOTALL)
    if entry is None:
        raise ValueError("text: expected PTX with an .entry, there is none")
    parameters: dict[str, tuple[int, int]] = {}
    offset = 0
    for kind, name, count in _PARAMETER.findall(entry[2] + "\n"):
        size = _bytes_of(kind)
        offset = -(-offset // size) * size
        if count:
            offset = -(-offset // 64) * 64  # tensor maps
        parameters[name] = offset, size * int(count or 1)
        offset += size * int(count or 1)
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", text)
    kernel = Kernel(entry[1], int(threads[1]) if threads else 128, [], {}, parameters)
    first_line = text[: entry.end()].count("\n")
    pending, number = "", 0
    for number, raw in enumerate(text[entry.end() :].split("\n"), first_line + 1):
        line = re.sub(r"//.*", "", raw).strip()
        if re.match(r"\.(reqntid|maxntid|minnctapersm|maxnreg|loc|file|pragma|section)\b", line) or not line:
            continue
        if line.startswith(".section"):
            break
        if match := re.match(r"([$\w]+):$", line):
            kernel.labels[match[1]] = len(kernel.instructions)
            continue
        pending += " " + line
        while (end := pending.find(";")) >= 0 or pending.strip() in ("{", "}"):
            if pending.strip() in ("{", "}"):
                pending = ""
                break
            statement, pending = pending[:end].strip(), pending[end + 1 :]
            statement = re.sub(r"^[{}]\s*", "", statement)
            _add(kernel, statement, number)
    return kernel


def _add(kernel: Kernel, statement: str, line: int) -> None:
    if match := _REGISTERS.match(statement):
        for name in (match[2], *re.findall(r"[%\w$]+", match[3])):
            kernel.registers[name] = _bytes_of(match[1])
    elif statement and not statement.startswith("."):
        match = _INSTRUCTION.match(statement)
        if match is None:
            raise ValueError(f"line {line}: no instruction: {statement[:80]}")
        kernel.instructions.append(Instruction(match[2], _split(match[3]), match[1] or "", line))
