"""Who makes a product: the heuristic, and stored tables with all that can be wrong with them."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bert_fast import backend, devices, explain
from bert_fast.cli import doctor
from bert_fast.kernels import _gemm_table, _gemm_tiles
from bert_fast.kernels._gemm_table import Choice, Table, Tile, program, read, slug, source_hash
from bert_fast.kernels._launch import assume_architecture

TILE = Tile(128, 256, 64, 8, 3, parts=4)
PROCESSORS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
BF16, HALF = torch.bfloat16, (torch.float16, torch.bfloat16)


def entry(tile: Tile | None = TILE, **changes: Any) -> dict[str, Any]:
    sizes = {"kind": "activation", "layout": "nt", "dtype": "bf16", "m": 16384, "n": 3072, "k": 768}
    return sizes | {"tile": tile and tile.to_json(), "us": {"library": 2.0, "ours": 1.0}} | changes


def content(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    head = {"format": 1, "device": "NVIDIA H200", "source": source_hash(), "triton": "3.6.0", "torch": "2.11"}
    return head | {"entries": list(entries)} | changes


def test_the_nearest_power_of_two_of_tokens_is_taken() -> None:
    small, large = Tile(64, 64, 64), Tile(128, 128, 64)
    table = Table(content(entry(small, m=1024), entry(large, m=16384), entry(None, m=2**20)))
    found = {m: table.find("activation", "nt", BF16, m, 3072, 768) for m in (1, 1000, 4096, 4097, 16384, 10**6)}
    assert found == {
        1: Choice(small), 1000: Choice(small), 4096: Choice(large), 4097: Choice(large), 16384: Choice(large),
        10**6: Choice(None),
    }  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"kind": "derivative"}, {"layout": "nn"}, {"dtype": torch.float16}, {"n": 3073}, {"k": 769}]
)
def test_other_products_have_no_choice(other: dict[str, Any]) -> None:
    asked = {"kind": "activation", "layout": "nt", "dtype": BF16, "m": 16384, "n": 3072, "k": 768}
    table = Table(content(entry()))
    assert table.find(**asked) == Choice(TILE)
    assert table.find(**(asked | other)) is None


def test_where_tokens_are_summed_over_they_are_k() -> None:
    table = Table(content(entry(layout="tn", kind="accumulate", m=30522, n=768, k=4096)))
    assert table.find("accumulate", "tn", BF16, 30522, 768, 3000) == Choice(TILE)
    assert table.find("accumulate", "tn", BF16, 3000, 768, 4096) is None


def test_a_good_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nvidia_h200.json"
    path.write_text(json.dumps(content(entry())))
    table, reason = read(path, "3.6.2")
    assert reason is None and table is not None and table.device == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no table is stored"),
        ("{", "is damaged"),
        ("[]", "the format is not 1"),
        (json.dumps({"format": 2}), "the format is not 1"),
        (json.dumps(content(device=3)), "device must be a string; got 3"),
        (json.dumps(content(entries={})), "entries must be a list"),
        (json.dumps(content(entry(kind="sum"))), "entry 0: ValueError: kind must be one of plain, "),
        (json.dumps(content(entry(), entry(m=0))), "entry 1: ValueError: m, n and k must be positive"),
        (json.dumps(content({"kind": "plain"})), "entry 0: KeyError"),
        (json.dumps(content(["plain"])), "entry 0: TypeError"),
        (json.dumps(content(entry() | {"tile": {"block_m": 64}})), "a tile must have the fields block_m, "),
        (json.dumps(content(entry() | {"tile": TILE.to_json() | {"parts": "2"}})), "parts of a tile must be of type"),
        (json.dumps(content(entry() | {"tile": TILE.to_json() | {"block_k": 48}})), "powers of two"),
        (json.dumps(content(source="0" * 16)), "was made from other kernels (source 0000000000000000, now "),
        (json.dumps(content(triton="3.7.0")), "was made with Triton 3.7.0, this is 3.6.0"),
    ],
)
def test_a_bad_table_is_not_used_and_says_why(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    table, said = read(path, "3.6.0")
    assert table is None and said is not None and reason in said


def test_stored_tables_are_named_after_their_device() -> None:
    for path in _gemm_table.FOLDER.glob("*.json"):
        assert path.stem == slug(Table(json.loads(path.read_text())).device)
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


@pytest.mark.parametrize("path", sorted(_gemm_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_stored_tables_are_live(path: Path) -> None:
    """Made from the present kernels, and the launcher passes its tiles to them as it did when they were timed."""
    from benchmarks.gemm_tuning.launches import launches_hash

    stored = json.loads(path.read_text())
    table, reason = read(path, stored["triton"])  # another Triton's users read that it is not used, and why
    assert table is not None, f"{reason}; measure anew: python -m benchmarks.gemm_tuning, then --write-table"
    assert stored["launches"] == launches_hash(stored["entries"]), f"{path.name}: its tiles are launched otherwise now"


def test_launches_change_with_what_the_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gemm_tuning.launches import launches_hash
    from bert_fast.kernels import _gemm_launch

    entries, specialized = [entry(), entry(None)], entry(Tile(128, 128, 64, 4, 4, warp_specialize=True))
    first = launches_hash(entries)
    assert launches_hash(entries) == first != launches_hash([*entries, specialized])
    monkeypatch.setattr(_gemm_launch, "_ALIGNMENT", 32)
    _gemm_launch._prepare.cache_clear()
    assert launches_hash(entries) != first
    _gemm_launch._prepare.cache_clear()


def test_the_hash_covers_all_that_is_compiled() -> None:
    """Every file in which something is that the kernels are made of."""
    from benchmarks.kit.programs import kernel_names, made_of

    reached = {file for kernel in kernel_names("_gemm_kernel") for file, _ in made_of("_gemm_kernel", kernel)}
    assert set(_gemm_table._SOURCES) == {f"{file}.py" for file in reached}


def test_the_hash_is_of_the_program() -> None:
    """Comments, docstrings and layout do not change it; everything else does."""
    text = 'X = 1\n\n\ndef f(a):\n    """Adds."""\n    return a + X  # one\n'
    same = '"""A file."""\nX = (1)\ndef f(a):\n  return (a\n    + X)\n'
    assert program(text) == program(same)
    for old, new in (("X = 1", "X = 2"), ("a + X", "a - X"), ("(a)", "(a, b)"), ("X = 1", "X = 1.0")):
        assert program(text.replace(old, new)) != program(text)


def test_a_stale_table_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `explain` for ops with products, and by `bert-fast doctor`; a device without a table is not."""
    monkeypatch.setattr(_gemm_table, "FOLDER", tmp_path)
    (tmp_path / "a_b.json").write_text(json.dumps(content(entry(), source="0" * 16, device="A B")))
    (tmp_path / "good.json").write_text(json.dumps(content(entry(), triton=metadata.version("triton"))))
    monkeypatch.setattr(backend, "triton_problems", lambda device: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=BF16)
    _gemm_table.stored.cache_clear()
    for device, is_stale in (("A B", True), ("good", False), ("none", False)):
        chip = devices.Chip("sm_90", device, (9, 0), 132, 227 * 1024)
        for module in (backend, devices):
            monkeypatch.setattr(module, "chip", lambda index, chip=chip: chip)
        monkeypatch.setattr(devices, "triton_problems", lambda device: [])
        monkeypatch.setattr(devices, "assembler", lambda capability: "ptxas")
        why = "a_b.json was made from other kernels (source 0000000000000000"
        assert (f"linear: the stored table of matrix products is not used: {why}" in explain("linear", x)) == is_stale
        assert "stored table" not in explain("layer_norm", x)
        advice = [line for line in doctor.collect()["advice"] if "without its stored table" in line]
        assert [why in line for line in advice] == [True] * is_stale
    _gemm_table.stored.cache_clear()


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_candidates(name: str, dtype: torch.dtype) -> None:
    tiles = _gemm_tiles.candidates(name, dtype)
    assert len(tiles) == len(set(tiles)) == (1 if dtype == torch.float32 else 4)
    assert all(Tile.from_json(json.loads(json.dumps(tile.to_json()))) == tile for tile in tiles)
    limit = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}[name] * 1024
    for tile in tiles:
        step = (tile.block_m + tile.block_n) * tile.block_k * dtype.itemsize
        assert step * tile.num_stages * tile.resident <= limit


def choice(kind: str, m: int, n: int = 3072, k: int = 768, name: str = "sm_90", dtype: torch.dtype = BF16) -> Any:
    return _gemm_tiles.heuristic(kind, m, n, k, dtype, name, 132)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["activation", "derivative", "recomputed"])
def test_the_library_makes_fp32_and_small_products(kind: str, name: str) -> None:
    for m in (1, 63, 64, 4096, 10**6):
        assert choice(kind, m, dtype=torch.float32, name=name) is None
        assert (choice(kind, m, name=name) is None) == (m < 64)


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_library_makes_what_leaves_nothing_to_fuse(name: str) -> None:
    """But for fp32 results of half precision on AMD, whose library rounds to half precision first."""
    a, b = torch.zeros(4096, 768, dtype=BF16), torch.zeros(3072, 768, dtype=BF16).t()
    with assume_architecture(name):
        assert _gemm_tiles.choose("plain", a, b, BF16) is None
        for kind in ("plain", "accumulate"):
            assert (_gemm_tiles.choose(kind, a, b, torch.float32) is None) == name.startswith("sm_")
            assert _gemm_tiles.choose(kind, a.float(), b.float(), torch.float32) is None
            assert kind == "plain" or _gemm_tiles.choose(kind, a, b, BF16) is None


def test_our_tiles_follow_k_and_the_number_of_tiles() -> None:
    wide, twin, _, small = _gemm_tiles.candidates("sm_90", BF16)
    assert choice("activation", 16384) == twin
    assert choice("activation", 16384, k=3072) == wide
    assert choice("accumulate", 30522, 768, 1024) == wide
    few = choice("activation", 128)
    assert (few.block_m, few.block_n, few.split_k) == (small.block_m, small.block_n, 1)
    split = choice("accumulate", 768, 768, 16384)
    assert split.split_k > 1 and split.block_m == small.block_m


def test_unaligned_rows_are_the_librarys() -> None:
    a, b = torch.zeros(4096, 768, dtype=BF16), torch.zeros(3072, 768, dtype=BF16).t()
    assert _gemm_tiles.choose("activation", a, b, BF16) is not None
    assert _gemm_tiles.choose("activation", a[:, 1:], b[1:], BF16) is None
    assert _gemm_tiles.choose("activation", a[:, :767], b[:767], BF16) is not None  # rows start at whole 16 bytes


@pytest.mark.parametrize(
    "wrong", [{"block_m": 24}, {"block_k": 8}, {"num_warps": 3}, {"parts": 3}, {"split_k": 0}, {"num_stages": 0}]
)
def test_tiles_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got Tile"):
        Tile(**({"block_m": 64, "block_n": 64, "block_k": 64} | wrong))
