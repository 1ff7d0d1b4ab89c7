"""Every launch configuration fits on every chip: a part of it rehearsed here, the whole as it was written down."""

import json
from pathlib import Path

import pytest

from benchmarks.families import family_names
from benchmarks.kit import programs
from tests.null_driver.server import run, run_command
from tools import kernel_record
from tools.null_driver import rehearsal
from tools.null_driver.driver import DEVICES

# Few, and quickly compiled: a product with tensor maps where there are any; whole heads of attention and rows with sums
# by turns.
PRODUCT = "linear gelu wide bf16"
BY_TURNS = (
    ("attention S<=32 D=16 bf16 qkv", "attention"),
    ("layer_norm H=1024 bf16 in a layer", "dropout_add_layer_norm"),
)


@pytest.mark.slow
@pytest.mark.parametrize("chip", DEVICES)
def test_chips_take_what_ships(chip: str) -> None:
    other, family = BY_TURNS[[*DEVICES].index(chip) % 2]
    arguments = ["--json", "--device", chip, f"--only={PRODUCT}", f"--only={other}"]
    found = json.loads(run_command("tools.null_driver.rehearsal", *arguments).splitlines()[-1])
    assert not [fault for one in found.values() for fault in one["faults"]]
    assert {family for family, one in found.items() if one["launches"]} == {"linear", family}
    assert max(one["shared_bytes"] for one in found.values()) <= DEVICES[chip].shared_bytes
    assert (found["linear"]["tensor_maps"] > 0) == (chip in ("sm_90", "sm_100"))


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


def test_everything_that_ships_was_taken_by_every_chip_as_it_is() -> None:
    assert not kernel_record.stale("rehearsed", rehearsal.digests()), "run make kernels"
    rows = kernel_record.read()["rehearsed"]
    assert {*rows} == {f"{family} {chip}" for family in family_names() for chip in DEVICES}
    for chip, device in DEVICES.items():
        of_chip = [rows[f"{family} {chip}"] for family in family_names()]
        assert sum(row["launches"] for row in of_chip) > 1000
        assert max(row["shared_bytes"] for row in of_chip) <= device.shared_bytes


def test_a_family_is_due_when_its_launchers_or_what_its_kernels_compile_to_are_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = rehearsal.digests()
    assert len(set(before.values())) == len(before), "each chip and family is its own"
    folder = tmp_path / "triton"
    folder.mkdir()
    for path in programs.KERNELS.glob("*.py"):
        (folder / path.name).write_text("# a comment\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    for module in (rehearsal, programs):
        monkeypatch.setattr(module, "KERNELS", folder)
    assert rehearsal.digests() == before
    with (folder / "dropout.py").open("a", encoding="utf-8") as file:
        file.write("another = 1\n")
    changed = {key.split(" ")[0] for key, digest in rehearsal.digests().items() if digest != before[key]}
    assert "dropout" in changed and "layer_norm" not in changed
    record = kernel_record.read()
    record["compiled"]["layer_norm_fwd sm_86"]["digest"] = "another"
    monkeypatch.setattr(kernel_record, "read", lambda: record)
    assert rehearsal.digests()["layer_norm sm_86"] != before["layer_norm sm_86"]
    assert rehearsal.digests()["layer_norm sm_89"] == before["layer_norm sm_89"]
