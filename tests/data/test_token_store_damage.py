"""Token stores whose bytes change: what opening notices, what `verify` notices, and what every broken field says."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_fast import BertTokenizer
from bert_fast.data import PretrainingSource, TokenStore, digests, tokenize_files
from bert_fast.errors import StoreError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "."]
CHUNK = 1000
NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CHUNK_BYTES", CHUNK)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_text("".join(draw.choice(["a short text .\n", "a .\n", "\n"]) for _ in range(2000)))
    return path


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: BertTokenizer) -> Path:
    return tokenize_files([text], tmp_path_factory.mktemp("stores") / "whole", tokenizer).path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "store")


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def refusal(store: Path, tokenizer: BertTokenizer | None = None) -> str | None:
    """Why a store cannot be opened."""
    try:
        TokenStore.open(store, tokenizer)
    except StoreError as error:
        return str(error)
    return None


def as_before_digests(store: Path, **changes: Any) -> None:
    """The store.json of earlier versions, with other values."""
    file = store / "store.json"
    info = json.loads(file.read_text())
    for name in ("digests", "digest", "chunk_bytes"):
        info.pop(name, None)
    info |= changes
    file.write_text(json.dumps({name: value for name, value in info.items() if value != "missing"}))


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "sentences.bin"])
def test_verify_finds_one_bit_and_says_where(store: Path, file: str) -> None:
    assert TokenStore.open(store).verify() is True
    path, draw = store / file, random.Random(0)
    num_bytes = path.stat().st_size
    assert num_bytes > 3 * CHUNK
    for bit in [64, 8 * num_bytes - 65, *(draw.randrange(64, 8 * num_bytes - 64) for _ in range(30))]:
        flip(path, bit)
        place = bit // 8 // CHUNK * CHUNK
        message = rf"{file}: is damaged from byte {place:,} on, in the next 1,000: expected digest \w{{16}}\.\.\., got"
        with pytest.raises(StoreError, match=message):
            TokenStore.open(store).verify()
        flip(path, bit)
    assert TokenStore.open(store).verify() is True


def test_opening_finds_one_bit_of_the_description(store: Path) -> None:
    file, draw = store / "store.json", random.Random(0)
    spaces = 0
    for bit in {draw.randrange(8 * file.stat().st_size) for _ in range(300)}:
        flip(file, bit)
        problem = refusal(store)
        if problem is None:  # one space that means nothing became another one
            assert file.read_bytes()[bit // 8 : bit // 8 + 1].isspace()
            spaces += 1
        else:
            assert str(file) in problem
        flip(file, bit)
    assert spaces < 30


def test_files_that_are_cut_off_or_gone(store: Path) -> None:
    opened = TokenStore.open(store)
    (store / "tokens.bin").unlink()
    with pytest.raises(StoreError, match=r"tokens\.bin: cannot be read: No such file"):
        opened.verify()
    (store / "tokens.bin").mkdir()
    with pytest.raises(StoreError, match=r"tokens\.bin: cannot be read \(Is a directory\)"):
        TokenStore.open(store)


def test_the_digest_is_that_of_the_content(
    store: Path, text: Path, tmp_path: Path, tokenizer: BertTokenizer, whole: Path
) -> None:
    digest = TokenStore.open(whole).digest
    again = shutil.copy(text, tmp_path / "again.txt")
    assert tokenize_files([again], tmp_path / "1", tokenizer, block_bytes=100).digest == digest
    other = text.read_text().replace("short", "text", 1)
    (tmp_path / "other.txt").write_text(other)
    assert tokenize_files([tmp_path / "other.txt"], tmp_path / "2", tokenizer).digest != digest
    as_before_digests(store)
    assert TokenStore.open(store).digest not in (digest, None)


def test_stores_of_earlier_versions(store: Path, tokenizer: BertTokenizer, text: Path) -> None:
    as_before_digests(store)
    opened = TokenStore.open(store, tokenizer)
    assert opened.verify() is False
    assert PretrainingSource(opened, tokenizer, max_length=16).lengths(0).sum() > 0
    assert tokenize_files([text], store, tokenizer).info == opened.info


WRONG: list[Any] = ["missing", None, True, -1, 10**30, 1.5, float("nan"), "x", [], {}, [[1]], [{"name": 1}], [{}]]
FIELDS = ["format_version", "tokenizer", "vocab_size", "dtype", "sources", "documents", "tokens", "sentences"]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_an_earlier_description_broken_in_every_way(
    store: Path, name: str, tokenizer: BertTokenizer
) -> None:
    as_before_digests(store)
    kept = (store / "store.json").read_text()
    right = json.loads(kept)[name]
    accepted = []
    for value in [*WRONG, 0, right + 1 if isinstance(right, int) else "<i8"]:
        (store / "store.json").write_text(kept)
        as_before_digests(store, **{name: value})
        problem = refusal(store, tokenizer)
        if problem is None:
            accepted.append(value)
        else:
            assert str(store) in problem
    # None: without sentences; the size of the vocabulary and the sources are for people.
    allowed = {"sentences": [None], "vocab_size": [10**30, 0, right], "sources": [[]], "format_version": [True]}
    assert all(value in [*allowed.get(name, []), len(WORDS) + 1] for value in accepted), accepted


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"null", id="null"),
        pytest.param(NESTED, id="nested"),
        pytest.param(b'{"format_version": ' + NESTED + b"}", id="a nested version"),
        pytest.param(b'{"format_version": ' + b"1" * 10_000 + b"}", id="a number without end"),
        pytest.param(b'{"format_version": 1, "digests": {}}', id="no digest of itself"),
    ],
)
def test_descriptions_that_are_none(store: Path, content: bytes) -> None:
    (store / "store.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.json: "):
        TokenStore.open(store)


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": []}, {"digests": {"/dev/zero": []}}, {"digests": {"tokens.bin": "x"}}, {"chunk_bytes": 0},
        {"digests": {"tokens.bin": [1]}}, {"chunk_bytes": "x"},
    ],
    ids=["a list", "another file", "text", "no chunks", "a number", "no number"],
)  # fmt: skip
def test_digests_of_somebody_who_knows_how(store: Path, changes: dict[str, Any]) -> None:
    file = store / "store.json"
    info = json.loads(file.read_text()) | changes
    del info["digest"]
    file.write_text(json.dumps(digests.seal(info)))
    with pytest.raises(StoreError, match=r"store\.json: is damaged"):
        TokenStore.open(store)


@pytest.mark.parametrize("file", ["documents.bin", "sentences.bin"])
def test_boundaries_that_do_not_ascend_are_not_trained_on(store: Path, file: str, tokenizer: BertTokenizer) -> None:
    flip(store / file, 8 * 800 + 33)
    with pytest.raises(StoreError, match=rf"store: {file[:-4]}: expected ascending boundaries, got .* at place 101"):
        PretrainingSource(TokenStore.open(store, tokenizer), tokenizer, max_length=16)


# While a store is written


class _Killed(BaseException):
    pass


def unfinished(text: Path, folder: Path, tokenizer: BertTokenizer) -> None:
    """A store whose writer was killed after some blocks."""
    calls = 0

    def kill(report: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise _Killed

    with pytest.raises(_Killed):
        tokenize_files([text], folder, tokenizer, block_bytes=1000, checkpoint_seconds=0.0, report=kill)
    assert (folder / "progress.json").exists()


def test_a_run_that_goes_on_writes_the_same_digests(
    text: Path, tmp_path: Path, tokenizer: BertTokenizer, whole: Path
) -> None:
    for version in ("this", "an earlier one"):
        folder = tmp_path / version
        unfinished(text, folder, tokenizer)
        if version != "this":
            record = json.loads((folder / "progress.json").read_text())
            del record["digests"], record["digest"]
            (folder / "progress.json").write_text(json.dumps(record))
        store = tokenize_files([text], folder, tokenizer, block_bytes=777)
        assert store.verify()
        assert (folder / "store.json").read_bytes() == (whole / "store.json").read_bytes()


@pytest.mark.parametrize("file", ["tokens.bin", "documents.bin", "sentences.bin", "progress.json"])
def test_damage_before_a_run_goes_on(text: Path, tmp_path: Path, tokenizer: BertTokenizer, file: str) -> None:
    unfinished(text, tmp_path / "store", tokenizer)
    path = tmp_path / "store" / file
    record = json.loads((tmp_path / "store/progress.json").read_text())
    counted = {"tokens.bin": 2 * record["progress"]["tokens"], "progress.json": 400}
    for name in ("documents", "sentences"):
        counted[f"{name}.bin"] = 8 * record["progress"][name]
    flip(path, 8 * (counted[file] - 1))
    with pytest.raises(StoreError, match="damaged"):
        tokenize_files([text], tmp_path / "store", tokenizer)


def test_what_was_added_in_part_is_no_damage(
    text: Path, tmp_path: Path, tokenizer: BertTokenizer, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out between two files of a block; the record that follows is of what came before it."""
    from bert_fast.data import token_store_writer

    append, calls = token_store_writer._GrowingFile.append, 0

    def fails(self: Any, values: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise MemoryError
        append(self, values)

    monkeypatch.setattr(token_store_writer._GrowingFile, "append", fails)
    with pytest.raises(MemoryError):
        tokenize_files([text], tmp_path / "store", tokenizer, block_bytes=1000)
    monkeypatch.undo()
    store = tokenize_files([text], tmp_path / "store", tokenizer)
    assert (store.path / "store.json").read_bytes() == (whole / "store.json").read_bytes()
