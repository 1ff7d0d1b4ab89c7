"""What the host spends on a layer does not rise, and the counting leaves out what it says."""

from pathlib import Path

import pytest

from tests.null_driver.server import run_command
from tools.host_cost import build, measure, parsing, table
from tools.host_cost.programs import LENGTHS

DUMP = """# callgrind format
part: {part}
desc: Trigger: Client Request: {label}
events: Ir
ob=(1) /lib/libtorch_cpu.so
fn=(1) at::mm(at::Tensor const&)
7 {host}
cfn=(2) at::native::AVX2::vectorized_loop<float>
calls=1 0
* 900
ob=(1)
fn=(2)
+1 900
ob=(2) /lib/_native.so
fn=(3) bert_fast::gemm_steps
-1 5
"""


def _write(folder: Path, *dumps: tuple[str, int]) -> None:
    for part, (label, host) in enumerate(dumps):
        (folder / f"out.{part}").write_text(DUMP.format(part=part, label=label, host=host), encoding="utf-8")


def test_arithmetic_of_torch_is_left_out_and_calls_are_counted_once(tmp_path: Path) -> None:
    _write(tmp_path, ("layer|2|forward", 40))
    assert parsing.label_of(tmp_path / "out.0") == "layer|2|forward"
    assert sum(parsing.costs(tmp_path / "out.0").values()) == 945
    assert parsing.host_instructions(tmp_path / "out.0") == 45
    (tmp_path / "out").write_text("desc: Trigger: Program termination\nfn=(1) f\n1 2\n", encoding="utf-8")
    assert parsing.label_of(tmp_path / "out") is None


def test_a_layer_is_a_difference_and_a_step_has_twelve(tmp_path: Path) -> None:
    counts = {f"{case}|{layers}|forward": 10 * layers + 100 for case in ("layer", "other") for layers in (2, 6)}
    _write(tmp_path, *counts.items())
    assert measure.from_dumps(tmp_path) == {"layer": {"forward": 10}, "other": {"forward": 225}}


def test_what_rises_above_the_margin_is_named() -> None:
    def of(count: int) -> table.Table:
        return {"bf16": {"layer": {"fused": {"forward": count}, "transformers": {"forward": 7}}}}

    assert table.risen(of(1000 + int(1000 * table.MARGIN)), of(1000)) == []
    assert table.risen(of(1040), of(1000)) == [
        "bf16, layer, forward: 1040 instructions of the host, 1000 were written down"
    ]
    assert next(iter(table.rows(of(14_000_000)))) == ("bf16", "layer", "forward", [14.0, 7e-6], 14 / 7e-6)


@pytest.mark.slow
def test_a_layer_costs_the_host_no_more_than_was_written_down() -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    found = measure.counted("autocast", "fused", [measure.LAYER])
    assert table.risen({"autocast": {measure.LAYER: {"fused": found[measure.LAYER]}}}, table.read()) == []


@pytest.mark.slow
def test_other_lengths_find_a_program() -> None:
    if (reason := build.missing(needs_valgrind=False)) is not None:
        pytest.skip(reason)
    if not LENGTHS.is_dir():
        pytest.skip(f"there are no length distributions at {LENGTHS}")
    said = run_command("tools.host_cost.__main__", "--programs", "--only", "packed_nsp")
    assert [line.split()[1] for line in said.splitlines() if line.startswith("packed")] == ["400", "400"]
