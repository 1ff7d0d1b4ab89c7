"""The ahead-of-time gate: it passes on what ships, and every condition that it holds can fail."""

import ast
import copy
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aot import cards
from benchmarks.aot import table as aot_table
from benchmarks.aot.__main__ import _is_drawn
from benchmarks.aot.check import DROPOUT_LIMIT, ISSUE_SHARE_LIMIT, compare, with_dropout_cost
from benchmarks.aot.device import CARDS, EVERY, TARGETS, derive

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "bert_fast" / "triton"
KEY = "dropout_add_layer_norm_bwd H=1024 bf16 dropout sm_90"
PRODUCTS_KEY = "attention_fwd tiled D=64 bf16 dropout sm_90"


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return aot_table.read()


@pytest.fixture
def one(table: dict[str, Any]) -> dict[str, Any]:
    """The table of one kernel, without fault but for what a test does to it."""
    return {"triton": table["triton"], "kernels": {KEY: dict(table["kernels"][KEY])}}


def gate(*arguments: str, packages: Path | None = None) -> "subprocess.CompletedProcess[str]":
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
    recorded, found = aot_table.read()["triton"], metadata.version("triton")
    if found != recorded:
        pytest.skip(f"the table is of Triton {recorded}, and {found} is installed")
    done = gate("--check", "--quick")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gate_passes_with_the_oldest_triton() -> None:
    """For the GPU that has figures of its own, by the record of that compiler."""
    if not (ROOT / ".compat" / "triton").is_dir():
        pytest.skip(".compat with the oldest supported Triton is not there: make test installs it")
    done = gate("--check", "--quick", packages=ROOT / ".compat")
    assert done.returncode == 0, done.stderr
    assert "Triton 3.6" in done.stdout


@pytest.mark.slow
def test_a_part_of_the_gate_runs_alone_and_writes_nothing() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    before = aot_table.TABLE_PATH.read_bytes()
    done = gate("--family", "dropout_add_layer_norm", "--target", "sm_90", "--only", "fwd H=384 bf16 dropout")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("dropout_add_layer_norm_fwd")]
    # The kernel without dropout comes along: without it there is no price of dropout.
    assert [row.split(" sm_90")[0].split()[-1] for row in rows] == ["plain", "dropout"]
    assert aot_table.TABLE_PATH.read_bytes() == before


def kernels_in_source() -> set[str]:
    """Functions of bert_fast/triton that are launched: decorated by triton.jit and named _..._kernel."""
    found = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return {name for name in found if name.endswith("_kernel")}


def test_every_kernel_is_in_the_table_for_every_target(table: dict[str, Any]) -> None:
    names = {name.removeprefix("_").removesuffix("_kernel") for name in kernels_in_source()}
    for target in TARGETS:
        present = {key.split(" ", 1)[0] for key in table["kernels"] if key.endswith(f" {target}")}
        assert present == names, target


def test_every_row_says_what_it_was_compiled_from(table: dict[str, Any]) -> None:
    codes = [row["code"] for row in table["kernels"].values()]
    assert len(set(codes)) == len(codes) and all(len(code) == 32 for code in codes)
    drawn = [code for code in codes if _is_drawn(code, 16)]
    of_cards = [row["code"] for row in cards.read()["kernels"].values()]
    assert len(set(of_cards)) == len(of_cards) and all(len(code) == 12 for code in of_cards)
    assert 0 < sum(_is_drawn(code, 128) for code in of_cards) < len(of_cards) / 64, "one in 128 of cards"
    assert len(codes) / 32 < len(drawn) < len(codes) / 8, "one in 16 is compiled again by every check"


def test_every_target_has_the_same_configurations(table: dict[str, Any]) -> None:
    by_target = [{key.rsplit(" ", 1)[0] for key in table["kernels"] if key.endswith(f" {one}")} for one in TARGETS]
    assert all(names == by_target[0] for names in by_target)
    assert sum(map(len, by_target)) == len(table["kernels"])


def test_residual_layer_norm_covers_every_dtype_and_width(table: dict[str, Any]) -> None:
    for target in TARGETS:
        for hidden_size in (384, 768, 1024):
            for dtype in ("fp32", "fp16", "bf16"):
                for direction in ("fwd", "bwd"):
                    for flag in ("plain", "dropout"):
                        key = f"dropout_add_layer_norm_{direction} H={hidden_size} {dtype} {flag} {target}"
                        assert key in table["kernels"]


def test_attention_covers_heads_regimes_and_features(table: dict[str, Any]) -> None:
    tiled, short = ("fwd", "bwd_dq", "bwd_dkdv"), ("fwd_short", "bwd_short")
    for target in TARGETS:
        for flag in ("plain", "dropout"):
            for head_dim in (16, 32, 64, 96, 128):
                for kernel in tiled:
                    assert f"attention_{kernel} tiled D={head_dim} bf16 {flag} {target}" in table["kernels"]
            for head_dim in (16, 32, 64):
                for kernel in short:
                    for size in (32, 64, 128):
                        assert f"attention_{kernel} S<={size} D={head_dim} bf16 {flag} {target}" in table["kernels"]
            for kernel in tiled:
                for rest in ("D=64 fp16", "D=64 fp32", "D=128 fp32", "D=64 bf16 causal", "D=64 bf16 bias"):
                    assert f"attention_{kernel} tiled {rest} {flag} {target}" in table["kernels"]
        for kernel in ("attention_bwd_bias tiled D=64 bf16 bias", "attention_bwd_table tiled D=64 bf16 relative_key"):
            assert f"{kernel} {target}" in table["kernels"]


def test_table_holds_no_problem(table: dict[str, Any]) -> None:
    assert compare(table, table) == []


def test_markdown_has_every_row(table: dict[str, Any], of_cards: dict[str, Any]) -> None:
    """Each configuration stands in its kernel's section twice, with sm_90's figures and with the other targets'."""
    expected: dict[str, list[str]] = {}
    for key in table["kernels"]:
        kernel, configuration = key.removesuffix(" sm_90").split(" ", 1)
        if key.endswith(" sm_90"):
            expected.setdefault(kernel, []).append(configuration)
    shown: dict[str, list[str]] = {}
    for line in aot_table.markdown(table).splitlines():
        if line.startswith("### "):
            rows = shown.setdefault(line[4:], [])
        elif line.startswith("| ") and not line.startswith(("| ---", "| `", "| registers")):
            rows.append(line.split(" | ")[0][2:])
    assert shown == {kernel: [*ones, *ones] for kernel, ones in expected.items()}
    for text in (aot_table.markdown_versions(table, oldest()), cards.markdown(of_cards)):
        assert [line.split(" | ")[0][2:] for line in text.splitlines()[2:]] == list(expected)


def test_page_names_every_target() -> None:
    page = (ROOT / "docs" / "kernels" / "ahead_of_time.md").read_text(encoding="utf-8")
    assert not [name for name in EVERY if f"`{name}`" not in page]
    assert f"## Triton {oldest()['triton']}" in page


def oldest() -> dict[str, Any]:
    return aot_table.read(aot_table.OLDEST_PATH)


def test_the_oldest_triton_has_a_record_of_the_same_kernels(table: dict[str, Any]) -> None:
    found = oldest()
    assert list(found["kernels"]) == [key for key in table["kernels"] if key.endswith(" sm_90")]
    assert compare(found, found) == []
    assert aot_table.OLDEST_PATH.read_text() == aot_table.to_json(found)
    assert found["triton"].startswith("3.6") and found["triton"] != table["triton"]
    codes = [row["code"] for row in found["kernels"].values()]
    assert not set(codes) & {row["code"] for row in table["kernels"].values()}, "the compiler is part of what decides"


def test_table_has_a_line_per_kernel_and_target(table: dict[str, Any]) -> None:
    raw = aot_table.TABLE_PATH.read_text()
    assert aot_table.to_json(table) == raw
    assert sum('":' in line or '": [' in line for line in raw.splitlines()) == len(table["kernels"]) + 3
    assert json.loads(raw)["columns"] == list(aot_table.COLUMNS)


@pytest.fixture(scope="module")
def of_cards() -> dict[str, Any]:
    return cards.read()


def test_cards_have_the_configurations_of_sm_80(table: dict[str, Any], of_cards: dict[str, Any]) -> None:
    names = {key.rsplit(" ", 1)[0] for key in table["kernels"] if key.endswith(" sm_80")}
    assert set(cards.names_of(of_cards["kernels"])) == names
    assert set(of_cards["kernels"]) == {f"{name} {card}" for name in names for card in CARDS}
    assert of_cards["triton"] == table["triton"]


def test_record_of_cards_holds_no_problem(of_cards: dict[str, Any]) -> None:
    assert compare(of_cards, of_cards) == []
    assert cards.CARDS_PATH.read_text() == cards.to_json(of_cards)
    assert cards.CARDS_PATH.stat().st_size < 150 * 1024


CARD_KEY = "gemm gelu twin bf16 sm_120"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("spill_bytes", 8, "spills (8 bytes, 0 instructions)"),
        ("shared_bytes", 99 * 1024 + 1, "101377 bytes of shared memory, limit 101376"),
        ("registers", 256, "256 registers, "),
    ],
)
def test_gate_fails_on_cards(field: str, value: int, message: str, of_cards: dict[str, Any]) -> None:
    row = of_cards["kernels"][CARD_KEY]
    known = {"triton": of_cards["triton"], "kernels": {CARD_KEY: row}}
    assert compare(known, known) == []
    [problem] = compare(known | {"kernels": {CARD_KEY: row | {field: value}}}, known)
    assert problem.startswith(f"{CARD_KEY}: {message}")


def test_kernels_that_may_spill_on_cards_may_not_elsewhere(one: dict[str, Any]) -> None:
    for target, count in (("sm_120", 0), ("sm_90", 1)):
        [row] = one["kernels"].values()
        spilling = {"triton": "any", "kernels": {f"lamb_moments fp16 {target}": row | {"spill_bytes": 16}}}
        assert len([what for what in compare(spilling, spilling) if "spills" in what]) == count


# What a limit of the target forbids, by the smallest change to one row that crosses it.
CROSSED = {
    "spill_bytes": (8, "spills"),
    "spill_instructions": (1, "spills"),
    "shared_bytes": (TARGETS["sm_90"].shared_limit_bytes + 1, "bytes of shared memory"),
    "loads_128": (0, "loads of 128 bits, 12 in the table"),
    "stores_128": (0, "stores of 128 bits, 12 in the table"),
    "registers": (None, "registers, "),  # one more than in the table
    "loop_barriers": (None, "barriers, "),
    "conversions": (None, "conversions of layouts, "),
    "resident_threads": (4096, "are meant to run at once"),
    "dropout_per_element": (DROPOUT_LIMIT["sm_90"] + 0.1, "dropout costs 18.1"),
}


def test_one_kernel_is_without_fault(one: dict[str, Any]) -> None:
    assert compare(one, one) == []


@pytest.mark.parametrize("field", CROSSED)
def test_gate_fails_on(field: str, one: dict[str, Any]) -> None:
    value, message = CROSSED[field]
    known, worse = copy.deepcopy(one), copy.deepcopy(one)
    if value is None:
        value = known["kernels"][KEY][field] + 1
    elif field.endswith("_128"):
        known["kernels"][KEY][field] = 12
    worse["kernels"][KEY][field] = value
    problems = compare(worse, known)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{KEY}: ") and message in problems[0]


@pytest.mark.parametrize(
    ("field", "message"), [("loop_instructions", "issue slots"), ("loop_half_rate", "arithmetic-logic pipe")]
)
def test_gate_fails_where_issuing_takes_longer_than_memory(field: str, message: str, one: dict[str, Any]) -> None:
    share = {"loop_instructions": "issue_share", "loop_half_rate": "half_rate_share"}[field]
    worse = copy.deepcopy(one)
    row = worse["kernels"][KEY]
    row["bytes_per_element"] = 8.0
    assert compare(worse, one) == []
    row[field] = round(row[field] * (ISSUE_SHARE_LIMIT + 0.05) / derive(row, "sm_90")[share])
    problems = compare(worse, one)
    assert len(problems) == 1 and message in problems[0]


def test_a_kernel_that_was_measured_may_issue_longer_but_not_any_longer(one: dict[str, Any]) -> None:
    key, (row,) = "dropout_add_layer_norm_bwd H=768 bf16 dropout sm_90", one["kernels"].values()
    row["bytes_per_element"] = 8.0
    others = [key.replace("768", "1024"), key.replace("bf16", "fp32")]
    known = one | {"kernels": {name: copy.deepcopy(row) for name in (key, *others)}}
    worse = copy.deepcopy(known)
    for share, expected in ((1.2, others), (1.6, [key, *others])):
        for slower in worse["kernels"].values():
            slower["loop_instructions"] = round(row["loop_instructions"] * share / derive(row, "sm_90")["issue_share"])
        problems = compare(worse, known)
        assert [problem.split(":")[0] for problem in problems if "issue slots" in problem] == expected


def test_only_named_kernels_may_spill_and_no_more_than_the_table_says(products: dict[str, Any]) -> None:
    [row] = products["kernels"].values()
    known = {"triton": products["triton"], "kernels": {"attention_fwd tiled D=64 fp32 bias dropout sm_90": row}}
    known["kernels"] |= {"attention_bwd_table tiled D=64 fp32 relative_key_query sm_80": row | {"spill_bytes": 16}}
    assert compare(known, known) == []
    worse = copy.deepcopy(known)
    for one in worse["kernels"].values():
        one["spill_bytes"] = 24
    said = [problem.split(": ")[1] for problem in compare(worse, known)]
    assert said == ["spills 24 bytes, 0 in the table", "spills 24 bytes, 16 in the table"]
    assert compare(worse | {"triton": "0.0"}, known) == [], "another compiler may spill a little more"
    for name in ("attention_fwd tiled D=128 bf16 bias dropout sm_90", "attention_fwd tiled D=64 fp32 dropout sm_90"):
        other = {"triton": products["triton"], "kernels": {name: row | {"spill_bytes": 8}}}
        assert len(compare(other, other)) == 1, name


def test_dropout_may_spill_a_little_where_it_is_named(products: dict[str, Any]) -> None:
    [row] = products["kernels"].values()
    for processor, spilled, count in (("sm_90", 88, 0), ("sm_90", 96, 1), ("sm_100", 8, 1)):
        name = f"attention_bwd_dkdv tiled D=64 bf16 dropout {processor}"
        one = {"triton": products["triton"], "kernels": {name: row | {"spill_bytes": spilled}}}
        assert len([problem for problem in compare(one, one) if "spills" in problem]) == count, (processor, spilled)


def test_scalar_registers_in_vector_registers_are_no_spill(table: dict[str, Any]) -> None:
    key = KEY.replace("sm_90", "gfx942")
    lanes = {"triton": table["triton"], "kernels": {key: table["kernels"][key] | {"spill_instructions": 5}}}
    assert compare(lanes, lanes) == []
    lanes["kernels"][key]["spill_bytes"] = 8
    assert len(compare(lanes, lanes)) == 1


def test_gate_fails_on_cases_that_claim_more_than_the_code_moves(one: dict[str, Any]) -> None:
    worse = copy.deepcopy(one)
    row = worse["kernels"][KEY]
    row["bytes_per_element"] = row["loop_bytes"] / row["elements_per_thread"] + 1
    assert [problem for problem in compare(worse, one) if "the case claims" in problem]


def test_gate_fails_on_a_kernel_without_wide_accesses(one: dict[str, Any]) -> None:
    worse = copy.deepcopy(one)
    worse["kernels"][KEY] |= {"loads_128": 0, "stores_128": 0}
    assert compare(worse, worse) == [f"{KEY}: no load or store of 128 bits at all"]


@pytest.fixture
def products(table: dict[str, Any]) -> dict[str, Any]:
    """The table of one kernel with matrix products."""
    return {"triton": table["triton"], "kernels": {PRODUCTS_KEY: dict(table["kernels"][PRODUCTS_KEY])}}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensor_core_instructions", 0, "no instruction of a tensor core"),
        ("warpgroup_products", 0, "no product of four warps (HGMMA)"),
        ("loop_multiply_adds", 1024, "the main loop makes 1024 multiply-adds a thread, the case claims 4096"),
        ("spill_bytes", 8, "spills (8 bytes, 0 instructions)"),
    ],
)
def test_gate_fails_on_products(field: str, value: int, message: str, products: dict[str, Any]) -> None:
    assert compare(products, products) == []
    worse = copy.deepcopy(products)
    worse["kernels"][PRODUCTS_KEY][field] = value
    [problem] = compare(worse, products)
    assert message in problem


GEMM_KEYS = ("gemm gelu twin bf16 sm_90", "gemm gelu third bf16 sm_90")


@pytest.mark.parametrize(
    ("key", "field", "message"),
    [
        (GEMM_KEYS[0], "bulk_copy_instructions", "no bulk copy (UTMALDG)"),
        (GEMM_KEYS[0], "warpgroup_products", "no product of four warps (HGMMA)"),
        (GEMM_KEYS[1], "register_reallocations", "no warps of their own for loads (USETMAXREG)"),
    ],
)
def test_gate_fails_on_matrix_products(key: str, field: str, message: str, table: dict[str, Any]) -> None:
    known = {"triton": table["triton"], "kernels": {key: dict(table["kernels"][key])}}
    assert compare(known, known) == []
    worse = copy.deepcopy(known)
    worse["kernels"][key][field] = 0
    assert compare(worse, known)[-1] == f"{key}: {message}"


def test_matrix_products_cover_tiles_and_epilogues(table: dict[str, Any]) -> None:
    what = ("gelu", "gelu unsaved", "gelu derivative", "gelu recomputed", "accumulate", "plain nt", "plain nn")
    for target in TARGETS:
        for one in what:
            for role in ("wide", "twin", "third", "small"):
                assert f"gemm {one} {role} bf16 {target}" in table["kernels"]
        for one in ("gelu", "gelu derivative", "gelu recomputed", "accumulate"):
            assert f"gemm {one} wide fp16 {target}" in table["kernels"]
            assert f"gemm {one} exact fp32 {target}" in table["kernels"]
    moved = [row for key, row in table["kernels"].items() if key.startswith("gemm ") and row["needs_bulk_copies"]]
    assert len(moved) >= 2 * 50
    assert any(row["is_specialized"] for row in moved)


def test_loads_of_pipelined_products_are_compared_for_one_compiler_only(products: dict[str, Any]) -> None:
    fewer = copy.deepcopy(products)
    fewer["kernels"][PRODUCTS_KEY]["loads_128"] -= 1
    assert len(compare(fewer, products)) == 1
    fewer["triton"] = "0.0"
    assert compare(fewer, products) == []


def test_half_precision_products_are_made_by_four_warps_on_hopper(table: dict[str, Any]) -> None:
    """Tiles of 32 queries or keys are too small for them; every other attention kernel has them, fp32 none."""
    for key, row in table["kernels"].items():
        if key.startswith("attention_") and key.endswith(" sm_90") and row["multiply_adds_per_element"]:
            if " fp32" in key:
                assert not row["warpgroup_products"], key
            if row["needs_warpgroup_products"]:
                assert row["warpgroup_products"], key
    assert sum(bool(row["needs_warpgroup_products"]) for row in table["kernels"].values()) >= 20


def test_gate_fails_on_kernels_that_come_and_go(one: dict[str, Any]) -> None:
    fewer = copy.deepcopy(one)
    del fewer["kernels"][KEY]
    advice = "run python -m benchmarks.aot"
    assert compare(fewer, one) == [f"no longer compiled, though in the table: {KEY}; {advice}"]
    assert compare(one, fewer) == [f"{KEY}: not in the table; {advice}"]
    assert compare(fewer, one, whole=False) == []


def test_registers_are_not_compared_across_versions_of_triton(one: dict[str, Any]) -> None:
    other = copy.deepcopy(one)
    other["triton"] = "0.0"
    other["kernels"][KEY]["registers"] -= 1
    assert compare(one, other) == []
    other["kernels"][KEY]["loads_128"] += 1
    assert len(compare(one, other)) == 1


def test_price_of_dropout() -> None:
    plain = {"loop_instructions": 100, "elements_per_thread": 8.0}
    rows = with_dropout_cost({"k plain sm_90": plain, "k dropout sm_90": plain | {"loop_instructions": 180}})
    assert rows["k dropout sm_90"]["dropout_per_element"] == 10.0
    half_a_tile = {"loop_instructions": 90, "elements_per_thread": 4.0}
    rows = with_dropout_cost({"k plain sm_90": plain, "k dropout sm_90": half_a_tile})
    assert rows["k dropout sm_90"]["dropout_per_element"] == 10.0
    assert "dropout_per_element" not in rows["k plain sm_90"]
