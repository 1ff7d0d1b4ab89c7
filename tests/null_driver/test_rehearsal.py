"""Every launch configuration fits on every chip: a part of it rehearsed here, the whole as it was written down."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.null_driver.server import run, run_command
from tools.null_driver import rehearsal
from tools.null_driver.driver import DEVICES

ROOT = Path(__file__).resolve().parents[2]
# Of every chip: the most shared memory, both regimes of attention, tensor maps where there are any, running sums.
CHOSEN = (
    "linear gelu wide bf16",
    "attention S<=128 D=64 bf16 dropout",
    "tiled D=128 bf16 dropout",
    "layer_norm H=1024 bf16",
)


@pytest.mark.slow
@pytest.mark.parametrize("chip", DEVICES)
def test_chips_take_what_ships(chip: str) -> None:
    arguments = ["--json", "--device", chip, *(f"--only={text}" for text in CHOSEN)]
    found = json.loads(run_command("tools.null_driver.rehearsal", *arguments).splitlines()[-1])
    assert found["faults"] == []
    assert found["kernels"] >= 8 and found["shared bytes"] <= found["shared limit"]
    assert (found["tensor maps"] > 0) == (chip in ("sm_90", "sm_100"))


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_86"])
def test_what_does_not_fit_is_named(chip: str) -> None:
    faults: list[str] = run("planted", chip)["faults"]
    named = {fault.split(":")[0] for fault in faults}
    assert named == {"another kernel", "another grid", "no programs", "stops"} | (
        {"large"} if chip == "sm_86" else set()
    )
    said = "\n".join(faults)
    for expected in ("compiled again: _store_kernel", "refused 1 times", "ValueError: a launcher's own"):
        assert expected in said
    if chip == "sm_86":
        assert "large: OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376" in said


@pytest.fixture(scope="module")
def record() -> dict[str, dict[str, Any]]:
    return rehearsal.read()


def test_record_is_of_the_present_sources(record: dict[str, dict[str, Any]]) -> None:
    advice = "run python -m tools.null_driver.rehearsal --record, after python -m benchmarks.aot"
    assert {chip: found["sources"] for chip, found in record.items()} == {
        chip: rehearsal.sources(chip) for chip in DEVICES
    }, advice


def test_everything_that_ships_was_taken_by_every_chip(record: dict[str, dict[str, Any]]) -> None:
    assert [found["faults"] for found in record.values()] == [[]] * len(DEVICES)
    assert len({found["calls"] for found in record.values()}) == 1
    for chip, found in record.items():
        assert found["kernels"] > 600 and found["launches"] >= found["kernels"], chip
        assert 0 < found["shared bytes"] <= found["shared limit"] == DEVICES[chip].shared_bytes


def test_page_has_the_record(record: dict[str, dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "null_driver.md").read_text(encoding="utf-8")
    assert "\n".join(rehearsal.rows(record)) in page


def test_other_kernels_are_other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = rehearsal.sources("sm_86")
    assert before != rehearsal.sources("sm_89")
    folder = tmp_path / "bert_fast" / "triton"
    folder.mkdir(parents=True)
    for path in (ROOT / "bert_fast" / "triton").glob("*.py"):
        (folder / path.name).write_text("# a comment\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(rehearsal, "ROOT", tmp_path)
    assert rehearsal.sources("sm_86") == before
    with (folder / "_launch.py").open("a", encoding="utf-8") as file:
        file.write("another = 1\n")
    assert rehearsal.sources("sm_86") != before
