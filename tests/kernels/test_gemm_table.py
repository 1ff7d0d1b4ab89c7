"""Who makes a product: the heuristic, and stored tables with all that can be wrong with them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bert_fast import backend, devices, explain
from bert_fast.cli import doctor
from bert_fast.triton import _gemm_tiles
from bert_fast.triton._gemm_tiles import Choice, Table, Tile, program, read, slug, source_hash
from bert_fast.triton._launch import assume_architecture

TILE = Tile(128, 256, 64, 8, 3, parts=4)
PROCESSORS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
BF16, HALF = torch.bfloat16, (torch.float16, torch.bfloat16)


def entry(tile: Tile | None = TILE, **changes: Any) -> dict[str, Any]:
    sizes = {"kind": "activation", "layout": "nt", "dtype": "bf16", "m": 16384, "n": 3072, "k": 768}
    return sizes | {"tile": tile and tile.to_json(), "us": {"library": 2.0, "ours": 1.0}} | changes


def content(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    head = {"format": 1, "device": "NVIDIA H200", "architecture": "sm_90", "multiprocessors": 132}
    return head | {"source": source_hash(), "tritons": ["3.6", "3.9"], "entries": list(entries)} | changes


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
    for triton in ("3.6.2", "3.9.0"):
        table, reason = read(path, triton)
        assert reason is None and table is not None and table.device == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no table is stored"),
        ("{", "is damaged"),
        ("[]", "the format is not 1"),
        (json.dumps({"format": 2}), "the format is not 1"),
        (json.dumps(content(device=3)), "device must be of type str; got 3"),
        (json.dumps(content(multiprocessors="132")), "multiprocessors must be of type int; got '132'"),
        (json.dumps(content(entries={})), "entries must be of type list; got {}"),
        (json.dumps(content(entry(kind="sum"))), "entry 0: ValueError: kind must be one of plain, "),
        (json.dumps(content(entry(), entry(m=0))), "entry 1: ValueError: m, n and k must be positive"),
        (json.dumps(content({"kind": "plain"})), "entry 0: KeyError"),
        (json.dumps(content(["plain"])), "entry 0: TypeError"),
        (json.dumps(content(entry() | {"tile": {"block_m": 64}})), "a tile must have the fields block_m, "),
        (json.dumps(content(entry() | {"tile": TILE.to_json() | {"parts": "2"}})), "parts of a tile must be of type"),
        (json.dumps(content(entry() | {"tile": TILE.to_json() | {"block_k": 48}})), "powers of two"),
        (json.dumps(content(source="0" * 16)), "was made from other kernels (source 0000000000000000, now "),
        (json.dumps(content(tritons=["3.7", "3.9"])), "is for Triton 3.7, 3.9, this is 3.6.0"),
    ],
)
def test_a_bad_table_is_not_used_and_says_why(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    table, said = read(path, "3.6.0")
    assert table is None and said is not None and reason in said


def test_stored_tables_are_named_after_their_device() -> None:
    for path in _gemm_tiles.FOLDER.glob("*.json"):
        assert path.stem == slug(Table(json.loads(path.read_text())).device)
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


@pytest.mark.parametrize("path", sorted(_gemm_tiles.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_stored_tables_are_live(path: Path) -> None:
    """Made from the present kernels, and the launcher passes its tiles to them as it did when they were timed."""
    from benchmarks.gemm_tuning.launches import launches_hash

    stored = json.loads(path.read_text())
    table, reason = read(path, metadata.version("triton"))
    how = "another Triton: python -m benchmarks.gemm_tuning --admit; else measure anew, then --write-table"
    assert table is not None, f"{reason}; {how}"
    assert stored["launches"] == launches_hash(stored["entries"]), f"{path.name}: its tiles are launched otherwise now"


def test_launches_change_with_what_the_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gemm_tuning.launches import launches_hash
    from bert_fast.triton import _gemm

    entries, specialized = [entry(), entry(None)], entry(Tile(128, 128, 64, 4, 4, warp_specialize=True))
    first = launches_hash(entries)
    assert launches_hash(entries) == first != launches_hash([*entries, specialized])
    monkeypatch.setattr(_gemm, "ALIGNMENT", 32)
    _gemm._prepare.cache_clear()
    assert launches_hash(entries) != first
    _gemm._prepare.cache_clear()


def test_the_hash_covers_all_that_is_compiled() -> None:
    """Every file in which something is that the kernels are made of."""
    from benchmarks.kit.programs import kernel_names, made_of

    reached = {file for kernel in kernel_names("_gemm_kernel") for file, _ in made_of("_gemm_kernel", kernel)}
    assert set(_gemm_tiles._SOURCES) == {f"{file}.py" for file in reached}


def test_the_hash_is_of_the_program() -> None:
    """Comments, docstrings and layout do not change it; everything else does."""
    text = 'X = 1\n\n\ndef f(a):\n    """Adds."""\n    return a + X  # one\n'
    same = '"""A file."""\nX = (1)\ndef f(a):\n  return (a\n    + X)\n'
    assert program(text) == program(same)
    for old, new in (("X = 1", "X = 2"), ("a + X", "a - X"), ("(a)", "(a, b)"), ("X = 1", "X = 1.0")):
        assert program(text.replace(old, new)) != program(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables."""
    monkeypatch.setattr(_gemm_tiles, "FOLDER", tmp_path)
    _gemm_tiles.stored.cache_clear()
    yield tmp_path
    _gemm_tiles.stored.cache_clear()


def test_the_nearest_gpus_table_is_taken(folder: Path) -> None:
    """Of the same instruction set, with at least four fifths of the multiprocessors; its own comes first."""
    tables = {"own": {"source": "0" * 16}, "a": {"multiprocessors": 100}, "b": {"multiprocessors": 120}}
    tables["ampere"] = {"architecture": "sm_80", "multiprocessors": 108}
    triton = ".".join(metadata.version("triton").split(".")[:2])
    for name, changes in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(content(entry(), device=name, tritons=[triton]) | changes))
    (folder / "damaged.json").write_text("{")

    def taken(*gpu: Any) -> str | None:
        table, problem = _gemm_tiles.stored(*gpu)
        return problem if table is None else table.device

    assert taken("NVIDIA H100", "sm_90", 114) == taken("NVIDIA H200", "sm_90", 132) == "b"
    assert taken("NVIDIA H100", "sm_90", 100) == taken("NVIDIA H100", "sm_90", 81) == "a"
    assert taken("NVIDIA H20", "sm_90", 78) is None
    assert taken("NVIDIA A100", "sm_80", 108) == "ampere" and taken("NVIDIA B200", "sm_100", 148) is None
    assert "was made from other kernels" in (taken("Own", "sm_90", 132) or "")
    assert "is damaged" in (taken("Damaged", "sm_90", 132) or "")


def test_explain_and_doctor_say_which_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = ".".join(metadata.version("triton").split(".")[:2])
    (folder / "a_b.json").write_text(json.dumps(content(entry(), source="0" * 16, device="A B")))
    good = content(entry(), device="good", multiprocessors=40, tritons=[triton])
    (folder / "good.json").write_text(json.dumps(good))
    monkeypatch.setattr(backend, "triton_problems", lambda device: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=BF16)
    why = "a_b.json was made from other kernels (source 0000000000000000"
    for device, count, said in (
        ("A B", 132, f"by no table: {why}"),
        ("good", 40, "by the table of good"),
        ("better", 44, "by the table of good, as none is stored for better"),
        ("none", 90, "by no table: none is stored for a GPU like none"),
    ):
        chip = devices.Chip("sm_90", device, (9, 0), count, 227 * 1024)
        for module in (backend, devices):
            monkeypatch.setattr(module, "chip", lambda index, chip=chip: chip)
        monkeypatch.setattr(devices, "triton_problems", lambda device: [])
        monkeypatch.setattr(devices, "assembler", lambda capability: "ptxas")
        *_, line = explain("linear", x).splitlines()
        assert line.startswith(f"linear: matrix products {said}")
        assert "table" not in explain("layer_norm", x)
        advice = [line for line in doctor.collect()["advice"] if "without its stored table" in line]
        assert [why in line for line in advice] == [True] * (device == "A B")


def test_a_table_is_for_the_tritons_that_compile_its_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gemm_tuning.table import admit

    wide = Tile(128, 256, 64, 8, 3, parts=4, resident=2)
    fails = Tile(128, 256, 64, 4, 3, max_registers=128)  # the accumulator alone does not fit
    for name, tile in (("good", Tile(64, 64, 64)), ("bad", wide), ("worse", fails)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content(entry(tile), tritons=["3.5"])))
    assert admit(tmp_path) == 1
    triton = ".".join(metadata.version("triton").split(".")[:2])
    found = {path.stem: json.loads(path.read_text())["tritons"] for path in tmp_path.glob("*.json")}
    assert found == {"good": ["3.5", triton], "bad": ["3.5"], "worse": ["3.5"]}
    said = capsys.readouterr().out
    assert "1 programs to a multiprocessor, expected 2" in said and "does not compile" in said


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


def vocabulary(
    kind: str, layout: str, m: int, n: int, k: int, name: str = "sm_90", dtype: torch.dtype = BF16
) -> Tile | None:
    return _gemm_tiles.of_vocabulary(kind, layout, (m, n, k), dtype, name, 132)


def test_odd_vocabularies_are_ours_on_sm_90() -> None:
    """By the tiles that an H200's table has for 30,522 words, as far as the number of rows has no say."""
    wide, twin, *_ = _gemm_tiles.candidates("sm_90", BF16)
    for words in (30522, 50265, 119547, 28996):
        assert vocabulary("plain", "nt", 2048, words, 768) == twin == vocabulary("plain", "tn", words, 768, 1001)
        assert vocabulary("accumulate", "tn", words, 768, 2048) == wide
        rows = vocabulary("plain", "nn", 2048, 768, words)
        assert rows is not None and replace(rows, split_k=1) == wide
        assert words / rows.split_k <= 16384 and 2 <= rows.split_k <= 8
    assert [vocabulary("plain", "nn", m, 768, 30522).split_k for m in (512, 1024, 2048, 10**5)] == [8, 5, 2, 2]
    for words in (30528, 8190, 3):  # a multiple of 8, less than a vocabulary, classes
        assert vocabulary("plain", "nt", 2048, words, 768) is None
    assert vocabulary("plain", "nn", 2048, 768, 250002) is None, "a sum of more than eight parts"
    assert vocabulary("plain", "nt", 2048, 768, 30522) is None, "tokens of another layout"
    assert vocabulary("plain", "nt", 63, 30522, 768) is None and vocabulary("plain", "tn", 30522, 768, 63) is None
    for name in ("sm_80", "sm_100", "sm_120", "gfx942"):
        assert vocabulary("plain", "nt", 2048, 30522, 768, name) is None
    assert vocabulary("plain", "nt", 2048, 30522, 768, dtype=torch.float32) is None


def test_odd_vocabularies_are_chosen_by_how_operands_lie() -> None:
    x, weight = torch.zeros(2048, 768, dtype=BF16), torch.zeros(30522, 768, dtype=BF16)
    scores = torch.zeros(2048, 30528, dtype=BF16)[:, :30522]
    with assume_architecture("sm_90"):
        assert _gemm_tiles.choose("plain", x, weight.t(), BF16) == vocabulary("plain", "nt", 2048, 30522, 768)
        assert _gemm_tiles.choose("plain", scores, weight, torch.float32) == vocabulary("plain", "nn", 2048, 768, 30522)
        chosen = _gemm_tiles.choose("accumulate", scores.t(), x, torch.float32)
        assert chosen == vocabulary("accumulate", "tn", 30522, 768, 2048)
        assert _gemm_tiles.choose("plain", x[:, :767], weight[:, :767].t(), BF16) is not None, "rows still start evenly"
        crooked = torch.zeros(2048, 30522, dtype=BF16)  # rows that start anywhere
        assert _gemm_tiles.choose("plain", crooked, weight, torch.float32) is None
    with assume_architecture("sm_80"):
        assert _gemm_tiles.choose("plain", x, weight.t(), BF16) is None


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
