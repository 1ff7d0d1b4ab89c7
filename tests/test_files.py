"""Files that are written whole: failures, links, threads."""

import os
import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bert_fast.files import create_temporary, is_temporary, only_writer, open_regular, write_atomically
from bert_fast.tokenization import BertTokenizer

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    for name, write in (("half a write", fail), ("no room", lambda temporary: temporary.write_bytes(b"new"))):
        if name == "no room":
            monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, write)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]


def test_temporary_files_are_known(tmp_path: Path) -> None:
    path = tmp_path / "file[1].txt"
    assert is_temporary(create_temporary(path).name, path)
    others = (create_temporary(tmp_path / "file1.txt").name, path.name, f".{path.name}.mine.tmp")
    assert not any(is_temporary(name, path) for name in others)


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that has the temporary name, nor one that has the name itself."""
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"other")
    path.symlink_to(other)
    write_atomically(path, lambda temporary: temporary.write_bytes(b"new"))
    assert (path.is_symlink(), path.read_bytes(), other.read_bytes()) == (False, b"new", b"other")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)
    planted = create_temporary(path)
    planted.unlink()
    for target in (other, tmp_path / "nothing"):
        planted.symlink_to(target)
        with pytest.raises(FileExistsError, match=planted.name):
            write_atomically(path, lambda temporary: temporary.write_bytes(b"newer"))
        planted.unlink()
    assert (path.read_bytes(), other.read_bytes(), (tmp_path / "nothing").exists()) == (b"new", b"other", False)


def test_a_tokenizer_follows_no_guessed_link(tmp_path: Path) -> None:
    other, directory = tmp_path / "other", tmp_path / "saved"
    other.write_bytes(b"other")
    directory.mkdir()
    tokenizer = BertTokenizer(VOCAB)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / f"{name}.{os.getpid()}.tmp").symlink_to(other)
    tokenizer.save_pretrained(directory)
    tokenizer.save_vocabulary(directory)
    assert other.read_bytes() == b"other"


@pytest.mark.parametrize("method", ["save_pretrained", "save_vocabulary"])
def test_threads_save_a_tokenizer_to_one_place(method: str, tmp_path: Path) -> None:
    tokenizer = BertTokenizer(VOCAB)
    save = getattr(tokenizer, method)
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: save(tmp_path), range(40)))
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).name for name in names[0]}
    assert BertTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for, a device never ends; links to files are files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "device", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Another process keeps writers out until it is done, or dead; other directories are open."""
    inside, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with only_writer(tmp_path):
            os.write(tell, b"x")
            signal.pause()
    os.read(inside, 1)
    done = threading.Event()

    def write() -> None:
        with only_writer(tmp_path):
            done.set()

    waiting = threading.Thread(target=write)
    waiting.start()
    (tmp_path / "other").mkdir()
    with only_writer(tmp_path / "other"):
        assert not done.wait(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    waiting.join()
    assert done.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_keeps_nobody_out(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with only_writer(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
