"""The ahead-of-time gate: it passes on what ships, and every condition that it holds can fail."""

import ast
import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aot import __main__ as gate
from benchmarks.aot import budgets
from benchmarks.aot.check import DROPOUT_LIMIT, ISSUE_SHARE_LIMIT, problems_of, with_dropout_cost
from benchmarks.aot.device import CARDS, EVERY, derive
from bert_fast.env import SETTINGS
from tools import kernel_record

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "bert_fast" / "triton"


def run_gate(*arguments: str, packages: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs the gate in a process of its own; `packages` go before those of the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-m", "benchmarks.aot", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_gate_passes() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    recorded, found = kernel_record.read()["triton"]["newest"], metadata.version("triton")
    if found != recorded:
        pytest.skip(f"the record is of Triton {recorded}, and {found} is installed")
    done = run_gate("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gate_passes_with_the_oldest_triton() -> None:
    """For the GPU that has figures of its own, by the record of that compiler."""
    if not (ROOT / ".compat" / "triton").is_dir():
        pytest.skip(".compat with the oldest supported Triton is not there: make test installs it")
    done = run_gate("--check", packages=ROOT / ".compat")
    assert done.returncode == 0, done.stderr
    assert f"Triton {kernel_record.read()['triton']['oldest']}" in done.stdout


@pytest.mark.slow
def test_a_part_of_the_gate_runs_alone_and_writes_nothing() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    before = kernel_record.PATH.read_bytes()
    done = run_gate("--family", "dropout_add_layer_norm", "--target", "sm_90", "--only", "fwd H=384 bf16 dropout")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("dropout_add_layer_norm_fwd")]
    # The kernel without dropout comes along: without it there is no price of dropout.
    assert [row.split(" sm_90")[0].split()[-1] for row in rows] == ["plain", "dropout"]
    assert kernel_record.PATH.read_bytes() == before


def kernels_in_source() -> set[str]:
    """Functions of bert_fast/triton that are launched: decorated by triton.jit and named _..._kernel."""
    found = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return {name.removeprefix("_").removesuffix("_kernel") for name in found if name.endswith("_kernel")}


@pytest.mark.parametrize("target", [*EVERY, "sm_90 oldest"])
def test_every_kernel_has_a_budget_on_every_target(target: str) -> None:
    compiled = kernel_record.read()["compiled"]
    kernels = {key.split(" ", 1)[0] for key in compiled if key.split(" ", 1)[1] == target}
    missing = kernels_in_source() - kernels
    # Those of stored dropout masks are launched on sm_90 alone.
    assert missing == set() if target.startswith("sm_90") else all(kernel.endswith("_stored") for kernel in missing)
    assert kernels <= kernels_in_source()
    assert {compiled[f"{kernel} {target}"]["configurations"] for kernel in kernels} >= {1, 5, 55}


def test_page_names_every_target() -> None:
    page = (ROOT / "docs" / "kernels" / "ahead_of_time.md").read_text(encoding="utf-8")
    assert not [name for name in EVERY if f"`{name}`" not in page]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    """Target -> names of what is compiled for it."""
    pytest.importorskip("triton")
    if SETTINGS.triton_interpret:
        pytest.skip("the interpreter replaces what is recorded here")
    return {target: [one.name for one in ones] for target, ones in gate.every_configuration().items()}


def test_every_target_has_the_same_configurations(names: dict[str, list[str]]) -> None:
    """But kernels of stored dropout masks, which sm_90 alone launches, each beside one that draws the mask."""
    stored = {one for one in names["sm_90"] if "_stored " in one}
    assert {one.replace("_stored ", " ") for one in stored} < {*names["sm_90"]}
    expected = sorted({*names["sm_90"]} - stored)
    assert {target: sorted(ones) for target, ones in names.items() if target != "sm_90"} == {
        target: expected for target in names if target != "sm_90"
    }


def test_residual_layer_norm_covers_every_dtype_and_width(names: dict[str, list[str]]) -> None:
    for hidden_size in (384, 768, 1024):
        for dtype in ("fp32", "fp16", "bf16"):
            for direction in ("fwd", "bwd"):
                for flag in ("plain", "dropout"):
                    assert f"dropout_add_layer_norm_{direction} H={hidden_size} {dtype} {flag}" in names["sm_90"]


def test_attention_covers_heads_regimes_and_features(names: dict[str, list[str]]) -> None:
    tiled, short, found = ("fwd", "bwd_dq", "bwd_dkdv"), ("fwd_short", "bwd_short"), names["sm_90"]
    for flag in ("plain", "dropout"):
        for head_dim in (16, 32, 64, 96, 128):
            for kernel in tiled:
                assert f"attention_{kernel} tiled D={head_dim} bf16 {flag}" in found
        for head_dim in (16, 32, 64):
            for kernel in short:
                for size in (32, 64, 128):
                    assert f"attention_{kernel} S<={size} D={head_dim} bf16 {flag}" in found
        for kernel in tiled:
            for rest in ("D=64 fp16", "D=64 fp32", "D=128 fp32", "D=64 bf16 causal", "D=64 bf16 bias"):
                assert f"attention_{kernel} tiled {rest} {flag}" in found
    for kernel, rest in itertools.product(tiled, ("D=16 bf16", "D=64 fp16", "D=128 bf16", "D=64 bf16 causal")):
        assert f"attention_{kernel}_stored tiled {rest} dropout" in found
    tables = {f"attention_bwd_table tiled D=64 bf16 {feature}" for feature in ("relative_key", "disentangled")}
    assert {"attention_bwd_bias tiled D=64 bf16 bias", *tables} <= {*found}


def test_matrix_products_cover_tiles_and_epilogues(names: dict[str, list[str]]) -> None:
    for what in ("gelu", "gelu unsaved", "gelu derivative", "gelu recomputed", "accumulate", "plain nt", "plain nn"):
        for role in ("wide", "twin", "third", "small"):
            assert f"gemm {what} {role} bf16" in names["sm_90"]
    for what in ("gelu", "gelu derivative", "gelu recomputed", "accumulate"):
        assert {f"gemm {what} wide fp16", f"gemm {what} exact fp32"} <= {*names["sm_90"]}


# Rows of three kernels on sm_90, with which nothing is wrong.
_MEMORY = {
    "registers": 95, "spill_bytes": 0, "spill_instructions": 0, "shared_bytes": 8260, "num_warps": 4,
    "loads_128": 16, "stores_128": 8, "loop_instructions": 322, "loop_half_rate": 92, "loop_bytes": 144,
    "in_flight_bytes": 76, "loop_special": 0, "loop_multiply_adds": 0, "tensor_core_instructions": 0,
    "warpgroup_products": 0, "bulk_copy_instructions": 0, "register_reallocations": 0, "loop_barriers": 5,
    "conversions": 3, "elements_per_thread": 8.0, "bytes_per_element": 8, "resident_threads": 640,
    "multiply_adds_per_element": None, "needs_warpgroup_products": False, "needs_bulk_copies": False,
    "is_specialized": False, "dropout_per_element": 10.62, "code": "a1",
}  # fmt: skip
_ATTENTION = _MEMORY | {
    "registers": 134, "shared_bytes": 57344, "loads_128": 36, "stores_128": 4, "loop_instructions": 503,
    "loop_multiply_adds": 4096, "tensor_core_instructions": 16, "warpgroup_products": 16, "elements_per_thread": 32.0,
    "bytes_per_element": None, "resident_threads": 128, "multiply_adds_per_element": 128,
    "needs_warpgroup_products": True, "dropout_per_element": 6.28,
}  # fmt: skip
_PRODUCT = _ATTENTION | {
    "registers": 168, "shared_bytes": 164456, "loads_128": 0, "stores_128": 0, "tensor_core_instructions": 8,
    "warpgroup_products": 8, "bulk_copy_instructions": 7, "register_reallocations": 7, "elements_per_thread": 128.0,
    "multiply_adds_per_element": 32, "needs_bulk_copies": True, "is_specialized": True, "dropout_per_element": None,
}  # fmt: skip
KEY = "dropout_add_layer_norm_bwd H=1024 bf16 dropout sm_90"
ATTENTION_KEY = "attention_fwd tiled D=64 bf16 dropout sm_90"
PRODUCT_KEY = "gemm gelu third bf16 sm_90"
ROWS: dict[str, dict[str, Any]] = {KEY: _MEMORY, ATTENTION_KEY: _ATTENTION, PRODUCT_KEY: _PRODUCT}


def test_rows_are_without_fault() -> None:
    assert problems_of(ROWS) == []


@pytest.mark.parametrize(
    ("key", "field", "value", "message"),
    [
        (KEY, "spill_bytes", 8, "spills (8 bytes, 0 instructions)"),
        (KEY, "spill_instructions", 1, "spills (0 bytes, 1 instructions)"),
        (KEY, "shared_bytes", 227 * 1024 + 1, "232449 bytes of shared memory, limit 232448"),
        (KEY, "resident_threads", 4096, "20 warps fit on a multiprocessor, 128 are meant to run at once"),
        (KEY, "dropout_per_element", DROPOUT_LIMIT["sm_90"] + 0.1, "dropout costs 18.1 instructions an element"),
        (KEY, "bytes_per_element", 19, "main loops move 144 bytes a thread, the case claims 152"),
        (ATTENTION_KEY, "spill_bytes", 96, "spills (96 bytes, 0 instructions)"),
        (ATTENTION_KEY, "tensor_core_instructions", 0, "no instruction of a tensor core"),
        (ATTENTION_KEY, "warpgroup_products", 0, "no product of four warps (HGMMA)"),
        (ATTENTION_KEY, "loop_multiply_adds", 1024, "the main loop makes 1024 multiply-adds a thread"),
        (PRODUCT_KEY, "warpgroup_products", 0, "no product of four warps (HGMMA)"),
        (PRODUCT_KEY, "bulk_copy_instructions", 0, "no bulk copy (UTMALDG)"),
        (PRODUCT_KEY, "register_reallocations", 0, "no warps of their own for loads (USETMAXREG)"),
    ],
)  # fmt: skip
def test_gate_fails_on(key: str, field: str, value: float, message: str) -> None:
    problems = problems_of({key: ROWS[key] | {field: value}})
    assert any(problem.startswith(f"{key}: {message}") for problem in problems), problems
    assert len(problems) == 1 or field == "bulk_copy_instructions", problems  # which are wide accesses, too


def test_gate_fails_on_a_kernel_without_wide_accesses() -> None:
    assert problems_of({KEY: _MEMORY | {"loads_128": 0, "stores_128": 0}}) == [
        f"{KEY}: no load or store of 128 bits at all"
    ]


@pytest.mark.parametrize(
    ("field", "share", "message"),
    [
        ("loop_instructions", "issue_share", "issue slots"),
        ("loop_half_rate", "half_rate_share", "arithmetic-logic pipe"),
    ],
)
def test_gate_fails_where_issuing_takes_longer_than_memory(field: str, share: str, message: str) -> None:
    allowed = _MEMORY[field] * ISSUE_SHARE_LIMIT / derive(_MEMORY, "sm_90")[share]
    assert problems_of({KEY: _MEMORY | {field: int(allowed * 0.98)}}) == []
    [problem] = problems_of({KEY: _MEMORY | {field: round(allowed * 1.05)}})
    assert message in problem


def test_a_kernel_that_was_measured_may_issue_longer_but_not_any_longer() -> None:
    key = "dropout_add_layer_norm_bwd H=768 bf16 dropout sm_90"
    others = [key.replace("768", "1024"), key.replace("bf16", "fp32")]
    for share, expected in ((1.2, others), (1.6, [key, *others])):
        slower = _MEMORY | {
            "loop_instructions": round(_MEMORY["loop_instructions"] * share / derive(_MEMORY, "sm_90")["issue_share"])
        }
        problems = problems_of(dict.fromkeys((key, *others), slower))
        assert [problem.split(":")[0] for problem in problems if "issue slots" in problem] == expected


@pytest.mark.parametrize(
    ("name", "spilled", "may"),
    [
        ("attention_fwd tiled D=64 fp32 bias dropout sm_90", 24, True),
        ("attention_bwd_table tiled D=64 fp32 disentangled sm_80", 500, True),
        ("attention_fwd tiled D=128 bf16 bias dropout sm_90", 8, False),
        ("attention_fwd tiled D=64 fp32 dropout sm_90", 8, False),
        ("attention_bwd_dkdv tiled D=64 bf16 dropout sm_90", 88, True),
        ("attention_bwd_dkdv tiled D=64 bf16 dropout sm_90", 96, False),
        ("attention_bwd_dkdv tiled D=64 bf16 dropout sm_100", 8, False),
        ("lamb_moments fp16 sm_120", 16, True),
        ("lamb_moments fp16 sm_90", 16, False),
    ],
)
def test_only_named_kernels_may_spill(name: str, spilled: int, may: bool) -> None:
    said = [problem for problem in problems_of({name: _ATTENTION | {"spill_bytes": spilled}}) if "spills" in problem]
    assert len(said) == (0 if may else 1)


def test_scalar_registers_in_vector_registers_are_no_spill() -> None:
    key = KEY.replace("sm_90", "gfx942")
    assert problems_of({key: _MEMORY | {"spill_instructions": 5}}) == []
    assert len(problems_of({key: _MEMORY | {"spill_instructions": 5, "spill_bytes": 8}})) == 1


def test_of_cards_space_is_judged() -> None:
    """There is no listing of theirs."""
    row = {"registers": 200, "spill_bytes": 0, "shared_bytes": 99 * 1024, "elements_per_thread": 8.0}
    assert problems_of({"gemm gelu twin bf16 sm_120": row}) == []
    [problem] = problems_of({"gemm gelu twin bf16 sm_120": row | {"shared_bytes": 99 * 1024 + 1}})
    assert problem.endswith("101377 bytes of shared memory, limit 101376")
    [problem] = problems_of({"gemm gelu twin bf16 sm_120": row | {"spill_bytes": 8}})
    assert problem.endswith("spills (8 bytes, 0 instructions)")
    assert budgets.budget([row | {"code": "a"}])["barriers"] is None


def test_price_of_dropout() -> None:
    plain = {"loop_instructions": 100, "elements_per_thread": 8.0}
    rows = with_dropout_cost({"k plain sm_90": plain, "k dropout sm_90": plain | {"loop_instructions": 180}})
    assert rows["k dropout sm_90"]["dropout_per_element"] == 10.0
    half_a_tile = {"loop_instructions": 90, "elements_per_thread": 4.0}
    rows = with_dropout_cost({"k plain sm_90": plain, "k dropout sm_90": half_a_tile})
    assert rows["k dropout sm_90"]["dropout_per_element"] == 10.0
    assert "dropout_per_element" not in rows["k plain sm_90"]


def test_a_budget_is_of_all_configurations() -> None:
    found = budgets.budget([_MEMORY, _MEMORY | {"registers": 90, "loop_instructions": 400, "code": "a2"}])
    assert found == {
        "configurations": 2, "registers": 95, "all_registers": 185, "spill_bytes": 0, "all_spill_bytes": 0,
        "shared_bytes": 8260, "wide_accesses": 48, "barriers": 10, "conversions": 6, "per_element": 50.0,
        "digest": budgets.digest(["a1", "a2"]),
    }  # fmt: skip
    assert set(found) == set(kernel_record.COLUMNS["compiled"])
    assert budgets.digest(["a2", "a1"]) == found["digest"] != budgets.digest(["a1"])


def test_what_grew_is_told_from_what_became_less() -> None:
    before = {"k sm_90": budgets.budget([_MEMORY])}
    after = {"k sm_90": budgets.budget([_MEMORY | {"registers": 96, "loop_barriers": 4, "loads_128": 15}])}
    worse, better = budgets.differences(after, before)
    assert worse == [
        "k sm_90: registers 95 -> 96", "k sm_90: all_registers 95 -> 96", "k sm_90: wide_accesses 24 -> 23"
    ]  # fmt: skip
    assert better == ["k sm_90: barriers 5 -> 4"]
    more = {"k sm_90": budgets.budget([_MEMORY, _MEMORY])}
    assert budgets.differences(more, before) == budgets.differences(after, {}) == ([], [])


@dataclass(frozen=True)
class One:
    """Stands for a configuration."""

    name: str
    code: str


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """A record of one kernel in two configurations, and these, which compile to rows of their own names."""
    rows = {f"norm {one} sm_90": _MEMORY | {"code": code} for one, code in (("a", "20"), ("b", "21"))}
    written = {"triton": {"newest": "3.9.0", "oldest": "3.6.0"}, "rehearsed": {}, "witnessed": {}}
    written["compiled"] = {
        f"norm sm_90{suffix}": budgets.budget([*rows.values()]) for suffix in ("", " oldest")
    }  # fmt: skip
    monkeypatch.setattr(kernel_record, "PATH", tmp_path / "kernels.json")
    kernel_record.PATH.write_text(kernel_record._to_json(written))
    monkeypatch.setattr(gate, "code_of", lambda one, target: one.code)
    monkeypatch.setattr(
        gate, "measured",
        lambda wanted: {
            f"{one.name} {target}": rows.get(f"{one.name} {target}", _MEMORY) | {"code": one.code}
            for target, ones in wanted.items()
            for one in ones
        },
    )  # fmt: skip
    return {"sm_90": [One("norm a", "20"), One("norm b", "21")]}


def test_check_names_kernels_that_are_others_than_recorded(record: dict[str, list[Any]]) -> None:
    assert gate.check(record, "") == gate.check(record, " oldest") == []
    changed = {"sm_90": [record["sm_90"][0], One("norm b", "22")]}
    assert gate.check(changed, "") == ["norm sm_90: differs from the record; run make kernels"]
    fewer = {"sm_90": [One("gelu a", "5")]}
    assert gate.check(fewer, "") == [
        "gelu sm_90: differs from the record; run make kernels",
        "norm sm_90: in the record, and not compiled any more; run make kernels",
    ]


def test_check_compiles_a_sample_and_holds_it_to_the_budget(
    record: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are hexadecimal: 20 is 32, which is drawn, and 21 is not."""
    seen = []

    def measured(wanted: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
        seen.extend(one.name for ones in wanted.values() for one in ones)
        return {"norm a sm_90": _MEMORY | {"registers": 96}}

    monkeypatch.setattr(gate, "measured", measured)
    assert gate.check(record, "") == ["norm a sm_90: 96 registers, budget 95"] and seen == ["norm a"]
    assert gate.check(record, None) == [], "another Triton allocates registers differently"


@pytest.mark.parametrize(("target", "drawn"), [("sm_90", 8), (next(iter(CARDS)), 1)])
def test_of_cards_fewer_are_drawn(target: str, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "code_of", lambda one, target: one.code)
    ones: Any = [One("k", f"{number:x}") for number in range(256)]
    assert len(gate.sample({target: ones}, 32)[target]) == drawn


def test_recording_compiles_what_differs_and_writes_it(
    record: dict[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = kernel_record.PATH.read_text()
    assert gate.record(record, "", "3.9.0", everything=False) == []
    assert kernel_record.PATH.read_text() == before
    wanted = {"sm_90": [*record["sm_90"], One("gelu a", "5")]}
    assert gate.record(wanted, "", "3.10.0", everything=False) == []
    assert "written: 1 of 2 kernels and targets" in capsys.readouterr().out
    found = kernel_record.read()
    assert [*found["compiled"]] == ["norm sm_90", "gelu sm_90", "norm sm_90 oldest"]
    assert found["triton"] == {"newest": "3.10.0", "oldest": "3.6.0"}
    assert gate.record({"sm_90": [One("gelu a", "6")]}, " oldest", "3.6.0", everything=False) == []
    assert [*kernel_record.read()["compiled"]] == ["norm sm_90", "gelu sm_90", "gelu sm_90 oldest"]


def test_what_is_wrong_is_not_recorded(record: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_record.PATH.read_text()
    monkeypatch.setattr(gate, "measured", lambda wanted: {"gelu a sm_90": _MEMORY | {"spill_bytes": 8}})
    [problem] = gate.record({"sm_90": [One("gelu a", "6")]}, "", "3.9.0", everything=False)
    assert "spills" in problem and kernel_record.PATH.read_text() == before
