"""Runs that do not finish: killed, crashed at any system call, without room. The next one ends with the same bytes."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.text_sources import ReadOptions, find_sources, read_blocks
from bert_fast.data.token_store_writer import StoreWriter, describe
from bert_fast.errors import SourceError, StoreError
from tests.patience import PATIENCE_S
from tests.process_server import CONTEXT, start_server

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "héllo", "你", "hello", "."]

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks at files through /proc")


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def digests(store: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(store.iterdir())}


def text_files(folder: Path, num_words: int) -> list[Path]:
    """A classic text file, JSON lines and the first file again."""
    draw = random.Random(num_words)
    words = ["a ", "texts ", "héllo ", "你", "\n", "\n", "\n\n", ". ", "xyz "]
    classic, records = folder / "x.txt", folder / "x.jsonl"
    classic.write_text("".join(draw.choice(words) for _ in range(num_words)), encoding="utf-8")
    lines = ("".join(draw.choice(words) for _ in range(draw.randrange(9))) for _ in range(num_words // 10))
    records.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return [classic, records, classic]


class _CrashError(BaseException):
    """The process is gone."""


class _Machine:
    """Stands between the writer and the system, and crashes at a call of a given number.

    From then on no call has an effect: nothing tidies up. The writing call writes half of its bytes first. If
    `loses_data`, what was not synced is lost, as when the power fails.
    """

    def __init__(self, crash_at: int, loses_data: bool) -> None:
        self.calls = 0
        self._crash_at = crash_at
        self._loses_data = loses_data
        self._synced: dict[str, int] = {}
        self._real = {name: getattr(os, name) for name in ("write", "fsync", "replace", "ftruncate", "unlink")}

    def _passes(self) -> bool:
        self.calls += 1
        if self.calls == self._crash_at:
            return False
        if self.calls > self._crash_at:
            raise _CrashError
        return True

    def write(self, descriptor: int, data: Any) -> int:
        self._synced.setdefault(os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size)
        if not self._passes():
            self._real["write"](descriptor, bytes(data)[: len(data) // 2])
            self._lose()
            raise _CrashError
        written: int = self._real["write"](descriptor, data)
        return written

    def fsync(self, descriptor: int) -> None:
        if not self._passes():
            self._lose()
            raise _CrashError
        self._synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self._passes():
                self._lose()
                raise _CrashError
            return self._real[name](*arguments, **options)

        return call

    def _lose(self) -> None:
        for path, size in self._synced.items() if self._loses_data else ():
            if path.endswith(".bin") and os.path.getsize(path) > size:
                os.truncate(path, size)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self._real:
                patch.setattr(os, name, getattr(self, name))
            yield


@needs_proc
@pytest.mark.parametrize("loses_data", [False, True])
def test_a_crash_at_any_system_call(
    tmp_path: Path, tokenizer: BertTokenizer, loses_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # `_Machine` says what a crash loses
    line = "hello hello a .\n"  # a block: what follows, an empty line for one, is in the next
    files = [tmp_path / "x.txt", tmp_path / "x.jsonl"]
    files[0].write_text(line * 2 + "\n" + line + "\n\n" + line, encoding="utf-8")
    files[1].write_text('{"text": "a"}\n{"text": ""}\n{"text": "texts"}\n', encoding="utf-8")
    options: dict[str, Any] = dict(block_bytes=len(line), checkpoint_seconds=0.0, num_threads=1)
    tokenize_files(files, tmp_path / "whole", tokenizer, **options)
    whole = digests(tmp_path / "whole")
    for crash_at in itertools.count(1):
        folder = tmp_path / f"store{crash_at}"
        machine = _Machine(crash_at, loses_data)
        try:
            with machine.running():
                tokenize_files(files, folder, tokenizer, **options)
        except _CrashError:
            pass
        else:
            break
        with contextlib.suppress(_CrashError), _Machine(crash_at // 2 + 5, loses_data).running():
            tokenize_files(files, folder, tokenizer, **options)  # crashes again, elsewhere
        tokenize_files(files, folder, tokenizer, **options)
        assert digests(folder) == whole, crash_at
    assert crash_at > 60


def begin(files: list[Path], folder: Path, tokenizer: BertTokenizer, **options: Any) -> Any:
    """Starts a process that tokenizes."""
    start_server()
    process = CONTEXT.Process(target=tokenize_files, args=(files, folder, tokenizer), kwargs=options)
    process.start()
    return process


def progress(folder: Path) -> int:
    """Tokens in the record of an unfinished store; -1 before there is one."""
    try:
        return int(json.loads((folder / "progress.json").read_bytes())["progress"]["tokens"])
    except FileNotFoundError:
        return -1


def kill_until_it_is_whole(files: list[Path], folder: Path, tokenizer: BertTokenizer) -> int:
    """Kills runs into one store until it is there, and compares it; returns how often a run was killed."""
    store, whole = folder / "store", folder / "whole"
    tokenize_files(files, whole, tokenizer)
    total = TokenStore.open(whole).info["tokens"]
    draw = random.Random(9)
    kills, seen = 0, []
    while not (store / "store.json").exists():
        seen.append(progress(store))
        # At first as soon as there is a directory, then when the record has grown, now and then a moment later.
        goal = -1 if kills == 0 else seen[-1] + total // 9
        process = begin(files, store, tokenizer, block_bytes=2000 + 1000 * kills, checkpoint_seconds=0.0)
        deadline = time.monotonic() + PATIENCE_S
        while process.is_alive() and not (store.exists() and progress(store) >= goal):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0)
        kills += process.exitcode == -9
        assert kills < 50
    assert seen == sorted(seen), "work was lost"
    assert len(tokenize_files(files, store, tokenizer)) > 0  # removes what a kill between the last two steps leaves
    assert digests(store) == digests(whole)
    return kills


def test_kill_9_at_many_moments(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    for num_words in (40_000, 200_000, 1_000_000):
        folder = tmp_path / str(num_words)
        folder.mkdir()
        if kill_until_it_is_whole(text_files(folder, num_words), folder, tokenizer) >= 5:
            return
        # This process waited for a processor while the run went on: with more text it goes on for longer.
    pytest.fail("the runs were over before they could be killed")


@needs_proc
def test_interrupted_runs_keep_what_came_before(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    files = text_files(tmp_path, 2000)
    tokenize_files(files, tmp_path / "whole", tokenizer)
    folder = tmp_path / "store"
    calls = 0

    def interrupt(report: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        tokenize_files(files, folder, tokenizer, block_bytes=300, report=interrupt)
    assert progress(folder) > 0
    with pytest.raises(StoreError, match="store: is not finished; run the command that began it once more"):
        TokenStore.open(folder)
    tokenize_files(files, folder, tokenizer, num_threads=2)
    assert digests(folder) == digests(tmp_path / "whole")
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2, "files stay open"


def test_going_on_with_something_else_is_refused(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"a\n" * 100 + b"\xff\n" + b"a\n" * 100)
    folder = tmp_path / "store"
    with pytest.raises(SourceError, match=r"x\.txt: not UTF-8: byte 200 \(line 101\)"):
        tokenize_files([path], folder, tokenizer, block_bytes=64)
    assert 0 < progress(folder) < 100
    other = tmp_path / "y.txt"
    other.write_bytes(b"a\n")
    with pytest.raises(StoreError, match="was begun with another tokenizer: expected"):
        tokenize_files([path], folder, BertTokenizer(WORDS, do_lower_case=False))
    with pytest.raises(StoreError, match="was begun with another field: expected 'text', got 'body'"):
        tokenize_files([path], folder, tokenizer, field="body")
    for files, format in (([path, other], "auto"), ([other], "auto"), ([path], "lines")):
        with pytest.raises(StoreError, match="was begun with other files or formats"):
            tokenize_files(files, folder, tokenizer, format=format)
    assert 0 < progress(folder) < 100
    # Another policy for broken bytes is no other store: up to here there were none.
    store = tokenize_files([path], folder, tokenizer, errors="replace")
    assert len(store) == 2 and len(store.tokens) == 200
    whole = tokenize_files([path], tmp_path / "whole", tokenizer, errors="replace", block_bytes=100)
    assert digests(folder) == digests(whole.path)


def test_a_file_that_changed_between_two_runs_is_refused(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"a\n" * 100 + b"\xff\n")
    folder = tmp_path / "store"
    with pytest.raises(SourceError):
        tokenize_files([path], folder, tokenizer, block_bytes=64)
    path.write_bytes(b"a\n" * 100 + b"a\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(
        StoreError, match=r"x\.txt was changed since the store was begun \(mtime_ns: expected \d+, got 1\)"
    ):
        tokenize_files([path], folder, tokenizer)
    (folder / "tokens.bin").write_bytes(b"")
    path.write_bytes(b"a\n" * 100 + b"\xff\n")
    record = json.loads((folder / "progress.json").read_bytes())
    os.utime(path, ns=(record["sources"][0]["mtime_ns"],) * 2)
    with pytest.raises(
        StoreError, match=r"tokens\.bin: expected at least \d+ bytes, got 0: the unfinished store is damaged"
    ):
        tokenize_files([path], folder, tokenizer)
    (folder / "progress.json").write_bytes(json.dumps({**record, "progress": {"source": 0, "no": 1}}).encode())
    with pytest.raises(StoreError, match=r"progress\.json: is damaged"):
        tokenize_files([path], folder, tokenizer)


def test_one_process_writes_at_a_time(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    files = text_files(tmp_path, 500)
    folder = tmp_path / "store"
    writer = StoreWriter(folder, describe(find_sources(files), tokenizer, "text"))
    try:
        with pytest.raises(StoreError, match="store: another process is writing it"):
            tokenize_files(files, folder, tokenizer)
    finally:
        writer.close()
    assert len(tokenize_files(files, folder, tokenizer)) > 0


def test_a_block_counts_whole_or_not_at_all(
    tmp_path: Path, tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a\n" * 40 + "\n" + "a\n" * 40)
    sources = find_sources([path])
    writer = StoreWriter(tmp_path / "store", describe(sources, tokenizer, "text"))
    blocks = list(read_blocks(sources[0], ReadOptions(block_bytes=16)))
    batches = [tokenizer.encode_ragged(block.texts, add_special_tokens=False) for block in blocks]
    for block, batch in zip(blocks[:3], batches[:3], strict=True):
        writer.add(0, block, batch.ids, batch.cu_seqlens)
    before = writer.progress
    write, written = os.write, list[int]()

    def full(descriptor: int, data: Any) -> int:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(descriptor)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left on device"):
        writer.add(0, blocks[3], batches[3].ids, batches[3].cu_seqlens)
    assert written, "the first file took its part of the block"
    assert writer.progress == before
    monkeypatch.undo()
    writer.record()
    writer.close()
    store = tokenize_files([path], tmp_path / "store", tokenizer)
    whole = tokenize_files([path], tmp_path / "whole", tokenizer)
    assert digests(store.path) == digests(whole.path)


@pytest.mark.parametrize("failing_call", [3, 10, 40])
def test_behind_a_block_that_could_not_be_written_none_is(
    tmp_path: Path, tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """There is room again at once: the blocks that were read and tokenized meanwhile wait for the next run."""
    files = text_files(tmp_path, 5000)
    tokenize_files(files, tmp_path / "whole", tokenizer)
    write, calls = os.write, itertools.count(1)

    def full_once(descriptor: int, data: Any) -> int:
        if next(calls) == failing_call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_once)
        with pytest.raises(StoreError, match="No space left on device"):
            tokenize_files(files, tmp_path / "store", tokenizer, block_bytes=200, checkpoint_seconds=0.0)
    tokenize_files(files, tmp_path / "store", tokenizer)
    assert digests(tmp_path / "store") == digests(tmp_path / "whole")


def test_a_limit_on_the_size_of_files(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    files = text_files(tmp_path, 30_000)
    tokenize_files(files, tmp_path / "whole", tokenizer)
    folder = tmp_path / "store"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, before[1]))
    try:
        with pytest.raises(StoreError, match=r"store: cannot be written \(File too large\); what was finished is kept"):
            tokenize_files(files, folder, tokenizer, block_bytes=3000, checkpoint_seconds=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert progress(folder) > 5000
    tokenize_files(files, folder, tokenizer)
    assert digests(folder) == digests(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        files = text_files(tmp_path, 60_000)
        tokenize_files(files, tmp_path / "whole", tokenizer)
        with pytest.raises(StoreError, match=r"store: cannot be written \(No space left on device\)") as caught:
            tokenize_files(files, disk / "store", tokenizer, block_bytes=3000, checkpoint_seconds=0.0)
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        assert progress(disk / "store") > 5000
        with pytest.raises(StoreError, match="No space left"):
            tokenize_files(files, disk / "store", tokenizer)  # still full, nothing is lost
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        tokenize_files(files, disk / "store", tokenizer)
        assert digests(disk / "store") == digests(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
