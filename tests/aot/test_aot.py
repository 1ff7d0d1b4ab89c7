"""The ahead-of-time gate: it passes on what ships, and it can fail."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aot import DROPOUT_LIMIT, TABLE_PATH, TARGETS, compare
from benchmarks.aot_inspect import SHARED_LIMIT_BYTES, read_amdgcn, read_sass

ROOT = Path(__file__).resolve().parents[2]
KEY = "dropout_add_layer_norm_bwd H=768 bf16 dropout sm_90"


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE_PATH.read_text())


@pytest.mark.slow
def test_gate_passes() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.aot", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_table_covers_every_target_dtype_and_width(table: dict[str, Any]) -> None:
    for target in TARGETS:
        for hidden_size in (384, 768, 1024):
            for dtype in ("fp32", "fp16", "bf16"):
                for direction in ("fwd", "bwd"):
                    for flag in ("plain", "dropout"):
                        key = f"dropout_add_layer_norm_{direction} H={hidden_size} {dtype} {flag} {target}"
                        assert key in table["kernels"]


def test_table_holds_no_problem(table: dict[str, Any]) -> None:
    assert compare(table, table) == []


def test_loads_and_stores_of_the_main_tensors_are_128_bits_wide(table: dict[str, Any]) -> None:
    """Everything [T, H] in the table; what remains is one number per row: mean, rstd, row, position, seed."""
    for key, row in table["kernels"].items():
        if "column_sums" not in key and "gfx" not in key:
            per_row = row["loads"] - row["loads_128"]
            assert row["loads_128"] > 0 and row["stores_128"] > 0, key
            assert per_row <= 9, key


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("spill_bytes", 8, "spills"),
        ("spill_instructions", 1, "spills"),
        ("shared_bytes", SHARED_LIMIT_BYTES["sm_90"] + 1, "bytes of shared memory"),
        ("loads_128", 0, "loads of 128 bits"),
        ("stores_128", 0, "stores of 128 bits"),
        ("registers", 255, "255 registers, "),
        ("resident_threads", 1024, "registers for the programs meant to run at once"),
        ("dropout_instructions_per_element", DROPOUT_LIMIT["sm_90"] + 0.1, "dropout costs 18.1"),
    ],
)
def test_gate_fails_on(field: str, value: float, message: str, table: dict[str, Any]) -> None:
    worse = copy.deepcopy(table)
    worse["kernels"][KEY][field] = value
    problems = compare(worse, table)
    assert len(problems) == 1
    assert problems[0].startswith(KEY) and message in problems[0]


def test_gate_fails_on_kernels_that_come_and_go(table: dict[str, Any]) -> None:
    fewer = copy.deepcopy(table)
    del fewer["kernels"][KEY]
    assert compare(fewer, table) == [f"no longer compiled, though in the table: {KEY}"]
    assert compare(table, fewer) == [f"{KEY}: not in the table; run python -m benchmarks.aot"]


def test_registers_are_not_compared_across_versions_of_triton(table: dict[str, Any]) -> None:
    other = copy.deepcopy(table)
    other["triton"] = "0.0"
    other["kernels"][KEY]["registers"] -= 1
    assert compare(table, other) == []


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R8], desc[UR4][R2.64] ;
        /*0040*/               @P1 STG.E.64 desc[UR4][R2.64], R8 ;
        /*0050*/                   STL [R1], R4 ;
        /*0060*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0070*/              @!P2 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BRA `(.L_x_1) ;
        /*00a0*/                   NOP ;
"""


def test_reading_sass() -> None:
    assert read_sass(SASS) == {
        "instructions": 10,
        "loop_instructions": 6,
        "loads": 3,
        "loads_128": 3,
        "stores": 1,
        "stores_128": 0,
        "spill_instructions": 1,
        "tensor_core_instructions": 1,
        "bulk_copy_instructions": 0,
    }


AMDGCN = """
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:
	global_load_dwordx4 v[0:3], v[4:5], off
	v_add_f32_e32 v0, v0, v1
	global_store_dword v[4:5], v0, off
	s_cbranch_scc1 .LBB0_1
	s_endpgm
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 2
"""


def test_reading_amd_assembly() -> None:
    counts = read_amdgcn(AMDGCN)
    assert counts["registers"] == 40
    assert counts["spill_bytes"] == 12
    assert counts["spill_instructions"] == 3
    assert (counts["instructions"], counts["loop_instructions"]) == (6, 4)
    assert (counts["loads"], counts["loads_128"], counts["stores"], counts["stores_128"]) == (1, 1, 1, 0)
