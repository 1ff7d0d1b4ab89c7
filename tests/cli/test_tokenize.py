"""`bert-fast tokenize`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast import BertTokenizer, terminal
from bert_fast.cli import main
from bert_fast.data import TokenStore
from tests.patience import PATIENCE_S

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "Short", "."]
COMMAND = [sys.executable, "-m", "bert_fast.cli.main", "tokenize"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a vocabulary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


@contextlib.contextmanager
def stdin_of(content: bytes) -> Iterator[None]:
    """Descriptor 0 is a pipe with some bytes in it, few enough for its buffer."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def documents(store: str) -> list[list[str]]:
    opened = TokenStore.open(store)
    return [[WORDS[token_id] for token_id in document] for document in opened]


def test_files_of_several_formats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_text("A short\ntext.\n\nTexts\n")
    Path("x.jsonl").write_text('{"text": "short a"}\n')
    assert main.main(["tokenize", "x.txt", "x.jsonl", "-o", "store", "--vocab", "vocab.txt"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("store: 3 documents, 8 tokens; 0 MB at ")
    assert captured.err == ""
    assert documents("store") == [["a", "short", "text", "."], ["text", "##s"], ["short", "a"]]
    assert main.main(["tokenize", "x.txt", "x.jsonl", "-o", "store", "--vocab", "vocab.txt"]) == 0
    assert capsys.readouterr().out == "store: 3 documents, 8 tokens; was complete already\n"
    assert main.main(["tokenize", "x.txt", "-o", "store", "--vocab", "vocab.txt"]) == 1
    assert capsys.readouterr().err.startswith("bert-fast tokenize: store: was begun with other files or formats")


def test_bytes_that_are_no_text_are_refused_or_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_bytes(b"a\n\nshort \xff text\n")
    command = ["tokenize", "x.txt", "--vocab", "vocab.txt", "--quiet"]
    assert main.main([*command, "-o", "strict"]) == 1
    assert "x.txt" in capsys.readouterr().err
    assert main.main([*command, "-o", "replaced", "--errors", "replace"]) == 0
    first, second = documents("replaced")
    assert first == ["a"] and second[0] == "short" and second[-1] == "text"


def test_options_reach_the_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_text('{"body": "Short\\n"}\n\n{"body": ""}')
    options = ["--format", "jsonl", "--field", "body", "--workers", "1", "--checkpoint", "0", "--quiet"]
    assert main.main(["tokenize", "x.txt", "-o", "cased", "--vocab", "vocab.txt", "--cased", *options]) == 0
    assert documents("cased") == [["Short"], []]
    BertTokenizer(WORDS, do_lower_case=False).save_pretrained("tokenizer")
    assert main.main(["tokenize", "x.txt", "-o", "same", "--tokenizer", "tokenizer", *options]) == 0
    assert [path.read_bytes() for path in sorted(Path("same").iterdir())] == [
        path.read_bytes() for path in sorted(Path("cased").iterdir())
    ]
    assert main.main(["tokenize", "x.txt", "-o", "other", "--tokenizer", "tokenizer", "--cased", *options]) == 1
    assert "--cased: goes with --vocab" in capsys.readouterr().err


def test_stdin_is_read_on_if_it_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tokenize", "-", "-o", "store", "--vocab", "vocab.txt", "--format", "lines"]
    with stdin_of(b"a\nshort\nte\xffxt"):
        assert main.main(command) == 1
    assert "-: not UTF-8: byte 10 (line 3) is 0xff" in capsys.readouterr().err
    with stdin_of(b"a\nshort\ntext"):
        assert main.main(command) == 0
    assert documents("store") == [["a"], ["short"], ["text"]]
    (source,) = TokenStore.open("store").info["sources"]
    assert source["size"] == 12 and "crc32" in source
    with stdin_of(b"a\nshort\ntext"):
        assert main.main(command) == 0
    assert "was complete already" in capsys.readouterr().out
    for content, message in ((b"a\nshort\ntext\n", "of 12 bytes, as it was before, got more"), (b"a", "only 1 bytes")):
        with stdin_of(content):
            assert main.main(command) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "No such file or directory: 'none.txt'"),
        (["."], ".: is a directory"),
        (["x.txt", "--vocab", "none"], "vocab: there is no file none"),
        (["x.txt", "-o", "x.txt"], "x.txt: expected a directory, got a file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.txt").write_text("a")
    assert main.main(["tokenize", "-o", "store", "--vocab", "vocab.txt", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast tokenize: ") and message in error and error.count("\n") == 1
    assert not Path("store").exists()


@pytest.mark.parametrize(
    "arguments", [["x.txt"], ["x.txt", "-o", "store"], ["-o", "store", "--vocab", "v"], ["x", "--checkpoint", "-1"],
                  ["x", "--workers", "-1"], ["x", "-o", "s", "--vocab", "v", "--tokenizer", "t"]]
)  # fmt: skip
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["tokenize", *arguments])
    assert exit_info.value.code == 2


def test_lines_of_progress(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    Path("x.txt").write_text("a\n" * 1000)
    command = ["tokenize", "x.txt", "-o", "store", "--vocab", "vocab.txt"]
    assert main.main(command) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("bert-fast tokenize: 100%, 0 MB at ")


def test_a_bar_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    Path("x.txt").write_text("a\n" * 1000)
    shown: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    from rich.live import Live

    monkeypatch.setattr(Live, "update", lambda self, line, **_: shown.append(str(line)))
    assert main.main(["tokenize", "x.txt", "-o", "store", "--vocab", "vocab.txt"]) == 0
    assert shown[-1].startswith(20 * "━" + "  100%  0 MB at ")
    assert shown[-1].endswith(" MB/s  0:00:00 left")


def start(arguments: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
    return subprocess.Popen(
        [*COMMAND, *arguments, "--vocab", "vocab.txt"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **options,
    )  # fmt: skip


def test_ctrl_c_while_stdin_says_nothing(folder: Path) -> None:
    """The run ends at once, with what came before written down, though a read of the pipe is under way."""
    process = start(["-", "-o", "store", "--checkpoint", "0"], stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"a short text\n" * 400_000)  # more than a block
    process.stdin.flush()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            if json.loads(Path("store/progress.json").read_bytes())["progress"]["tokens"] > 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 130
    assert process.stderr.read() == b"bert-fast tokenize: interrupted; the same command goes on from here\n"
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def test_memory_does_not_grow_with_the_input(folder: Path) -> None:
    """Peak memory of two processes that read 12 MB and 120 MB from a pipe; the second store has 72 MB of ids."""
    piece = b"a short text . texts\n" * 50_000  # 1 MB
    peaks = []
    for megabytes in (12, 120):
        process = start(["-", "-o", f"store{megabytes}", "--quiet", "--checkpoint", "60"], stdin=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for _ in range(megabytes):
            process.stdin.write(piece)
        process.stdin.close()
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, process.stderr.read()
        process.stdout.close()
        process.stderr.close()
        assert f"{megabytes * 50_000 * 6:,} tokens".encode() in out
        peaks.append(usage.ru_maxrss)  # KiB
    assert peaks[1] - peaks[0] < 48 * 1024, peaks


@pytest.mark.slow
def test_a_line_of_200_mb(folder: Path) -> None:
    piece = b"a short text . texts " * 50_000
    with open("x.txt", "wb") as file:
        for _ in range(200):
            file.write(piece)
        file.write(b"\nshort")
    assert main.main(["tokenize", "x.txt", "-o", "store", "--vocab", "vocab.txt", "--format", "lines"]) == 0
    store = TokenStore.open("store")
    assert np.diff(store.boundaries).tolist() == [200 * 50_000 * 6, 1]
    expected = [WORDS.index(word) for word in ("a", "short", "text", ".", "text", "##s")]
    assert (store[0].reshape(-1, 6) == np.array(expected, dtype=np.uint16)).all()
    assert store[1].tolist() == [WORDS.index("short")]
