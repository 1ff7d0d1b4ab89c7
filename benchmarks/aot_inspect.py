"""Reads what a compiled Triton kernel became: registers, spills, shared memory, instructions, width of accesses.

NVIDIA: `cuobjdump` and `nvdisasm` of the Triton wheel, on the cubin. AMD: the assembly text that Triton keeps.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["SHARED_LIMIT_BYTES", "inspect", "main_loop", "read_amdgcn", "read_sass"]

SHARED_LIMIT_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def _nvidia_tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run_on_cubin(tool: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        return subprocess.run([*tool, file.name], capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)


def main_loop(
    instructions: list[str], labels: dict[str, int], branches: list[tuple[int, str]], load: tuple[str, ...]
) -> int:
    """Instructions of the longest loop that loads from global memory, or of the whole kernel where none does.

    Loops of less than an eighth of the kernel do not count: AMD's compiler writes such a loop around a single load.

    instructions: opcodes in order; labels: name -> index of the instruction that it stands before;
    branches: (index of the branch, label); load: how the opcodes of global loads begin.
    """
    spans = []
    for end, label in branches:
        body = instructions[labels.get(label, end) : end + 1]
        if any(op.startswith(load) for op in body):
            spans.append(len(body))
    longest = max(spans, default=0)
    return longest if longest * 8 >= len(instructions) else len(instructions)


def read_sass(sass: str) -> dict[str, Any]:
    """Counts of a listing of `nvdisasm -c`."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            opcode, operands = match[1], match[2]
            if opcode == "NOP":
                continue
            if opcode.startswith("BRA") and (target := re.search(r"\.L_x_\d+", operands)):
                branches.append((len(instructions), target[0]))
            instructions.append(opcode)
    loads = [op for op in instructions if op.startswith(("LDG.", "LDGSTS."))]
    stores = [op for op in instructions if op.startswith("STG.")]
    return {
        "instructions": len(instructions),
        "loop_instructions": main_loop(instructions, labels, branches, ("LDG",)),
        "loads": len(loads),
        "loads_128": sum(op.endswith(".128") or ".128." in op for op in loads),
        "stores": len(stores),
        "stores_128": sum(op.endswith(".128") or ".128." in op for op in stores),
        "spill_instructions": sum(op.startswith(("LDL", "STL")) for op in instructions),
        "tensor_core_instructions": sum("MMA" in op for op in instructions),
        "bulk_copy_instructions": sum(op.startswith(("UTMALDG", "UTMASTG", "UBLKCP")) for op in instructions),
    }


def _inspect_nvidia(compiled: Any) -> dict[str, Any]:
    cubin = compiled.asm["cubin"]
    usage = _run_on_cubin([_nvidia_tool("cuobjdump"), "-res-usage"], cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert match is not None, usage
    registers, stack, local = map(int, match.groups())
    counts = read_sass(_run_on_cubin([_nvidia_tool("nvdisasm"), "-c"], cubin))
    return {"registers": registers, "spill_bytes": stack + local} | counts


def read_amdgcn(assembly: str) -> dict[str, Any]:
    """Counts of AMD assembly text; its metadata lies at the end, as YAML."""

    def metadata(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert match is not None, name
        return int(match[1])

    instructions: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.?LBB\d+_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s+((?:s|v|ds|global|buffer|flat|scratch)_\w+)\s*(.*)", line):
            if match[1].startswith(("s_branch", "s_cbranch")):
                branches.append((len(instructions), match[2].split(";")[0].strip()))
            instructions.append(match[1])
            if match[1] == "s_endpgm":
                break
    loads = [op for op in instructions if op.startswith(("global_load", "buffer_load"))]
    stores = [op for op in instructions if op.startswith(("global_store", "buffer_store"))]
    return {
        "registers": metadata("vgpr_count"),
        "spill_bytes": metadata("private_segment_fixed_size"),
        "instructions": len(instructions),
        "loop_instructions": main_loop(instructions, labels, branches, ("global_load", "buffer_load")),
        "loads": len(loads),
        "loads_128": sum(op.endswith("dwordx4") for op in loads),
        "stores": len(stores),
        "stores_128": sum(op.endswith("dwordx4") for op in stores),
        "spill_instructions": metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        "tensor_core_instructions": sum("mfma" in op for op in instructions),
        "bulk_copy_instructions": 0,
    }


def inspect(compiled: Any, target: str) -> dict[str, Any]:
    """One row of the table for a kernel that `triton.compile` made for a target."""
    row = _inspect_nvidia(compiled) if target.startswith("sm_") else read_amdgcn(compiled.asm["amdgcn"])
    return row | {"shared_bytes": int(compiled.metadata.shared)}
