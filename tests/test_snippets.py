"""Every snippet of every page runs as printed, or has a reason here not to. Commands are read as far as their flags."""

import contextlib
import importlib
import mmap
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bert_fast
from bert_fast.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "another", "who", "wrote", "faust"]
TEXTS = ["a short text another short text", "another text"]

# Pages whose snippets of a language have a test of their own -> that test.
OWN_TESTS = {
    ("README.md", "python"): "tests/test_documentation.py",
    ("README.md", "bash"): "tests/test_documentation.py",
    ("CONTRIBUTING.md", "python"): "tests/test_contributing.py",
    ("docs/finetuning.md", "python"): "tests/training/test_finetuning_page.py",
    ("docs/finetuning.md", "bash"): "tests/training/test_finetuning_page.py",
    ("docs/migration.md", "python"): "tests/test_documentation.py",
    ("docs/pretraining_data.md", "python"): "tests/data/test_pretraining.py",
    ("docs/scaling.md", "bash"): "tests/training/test_scaling_page.py",
    ("docs/token_store.md", "python"): "tests/data/test_token_store.py",
    ("docs/training.md", "python"): "tests/training/test_training_page.py",
    ("docs/training.md", "bash"): "tests/training/test_training_page.py",
}
# Snippets that no test runs -> why.
NOT_RUN = {
    ("README.md", "sh"): "installs; names of targets are checked in tests/test_documentation.py",
    ("docs/cpp_api.md", "cpp"): "part of examples/cpp, which the tests of C++ build",
    ("docs/cpp_api.md", "sh"): "builds for minutes",
    ("docs/host_cost.md", "bash"): "needs valgrind, and minutes",
    ("docs/migration.md", "py"): "needs a GPU: CUDA graphs, batches on the device",
    ("docs/recipes.md", "bash"): "installs, and prepares data for minutes",
    ("docs/start.md", "sh"): "installs",
}
_CODE = ("python", "py", "bash", "sh", "cpp", "console", "pycon")


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that pages name: a model, a vocabulary, texts."""
    pytest.importorskip("transformers", minversion="5")
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    config = bert_fast.BertConfig(
        vocab_size=len(WORDS) + 2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=512,
    )  # fmt: skip
    bert_fast.BertForMaskedLM(config).save_pretrained("path/to/model")
    for place in (Path("path/to/model/vocab.txt"), Path("vocab.txt")):
        place.write_text("\n".join(WORDS) + "\n")
    Path("bert-base-uncased").symlink_to("path/to/model")  # on the hub, which no test asks
    return tmp_path


def _of_embeddings() -> dict[str, Any]:
    pytest.importorskip("sentence_transformers", minversion="6")
    from tests.huggingface.sentence_folders import make_folder

    make_folder("Bert", Path("made")).save("path/to/model")
    return {}


def _of_tokenizers() -> dict[str, Any]:
    pyarrow = pytest.importorskip("pyarrow")
    Path("texts.bin").write_bytes("".join(TEXTS).encode())
    return {
        "texts": list(TEXTS), "questions": ["who wrote faust"], "contexts": ["a short text " * 200], "ids": [5, 6],
        "model": bert_fast.BertModel.from_pretrained("path/to/model"), "i": 0, "mmap": mmap,
        "boundaries": np.cumsum([0, *map(len, TEXTS)]), "table": pyarrow.table({"text": TEXTS}),
    }  # fmt: skip


def _of_unigram() -> dict[str, Any]:
    import json

    from tests.huggingface.sentence_folders import unigram_state

    for place in (Path("path/to/model/tokenizer.json"), Path("tokenizer.json")):
        place.write_text(json.dumps(unigram_state()))
    return {"texts": TEXTS}


def _of_serving() -> dict[str, Any]:
    import transformers

    ids = torch.randint(5, len(WORDS), (2, 6))
    return {
        "transformers": transformers, "torch": torch, "bert_fast": bert_fast, "folder": "path/to/model", "ids": ids,
        "mask": torch.ones_like(ids),
    }  # fmt: skip


# Pages whose snippets run one after the other in `folder` -> makes what they take for granted.
RUN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/embeddings.md": _of_embeddings,
    "docs/fuse.md": lambda: {"path": "path/to/model"},
    "docs/serving.md": _of_serving,
    "docs/start.md": dict,
    "docs/tokenizer.md": _of_tokenizers,
    "docs/unigram.md": _of_unigram,
}


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
@pytest.mark.parametrize("page", RUN)
def test_python_of_a_page_runs_as_printed(page: str, folder: Path) -> None:
    code = "\n".join(snippets(ROOT / page, "python"))
    if page == "docs/unigram.md" and bert_fast.native.load() is None:
        pytest.skip("Unigram tokenizers need the C++ extension")
    exec(compile(code, page, "exec"), {"__name__": "__main__"} | RUN[page]())


def commands_of(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


COMMANDS = {
    name_of(page): [words for text in snippets(page, "(?:bash|sh)") for words in commands_of(text)]
    for page in PAGES
    if not any((name_of(page), language) in {**OWN_TESTS, **NOT_RUN} for language in ("bash", "sh"))
}
FLAGS = [(page, words) for page, commands in COMMANDS.items() for words in commands]


@pytest.mark.parametrize(("page", "words"), FLAGS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(FLAGS)])
def test_commands_of_a_page_are_there(
    page: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of `bert-fast` are read; of other programs the module or the file that is run exists."""
    program, *rest = words
    if program == "python":
        found = importlib.util.find_spec(rest[1]) if rest[0] == "-m" else (ROOT / rest[0]).is_file()
        assert found, words
        return
    assert program == "bert-fast", words
    monkeypatch.chdir(ROOT)  # whose examples are named

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt  # all flags are read by then

    for name in ("pretrain", "finetune"):
        monkeypatch.setattr(f"bert_fast.cli.{name}.check_output", stop)
    monkeypatch.setattr("bert_fast.cli.tokenize._tokenizer", stop)
    with contextlib.suppress(SystemExit):
        assert main.main(rest) == 130, capsys.readouterr().err
        return
    pytest.fail(capsys.readouterr().err)


def test_every_snippet_runs_or_has_a_reason() -> None:
    there = {
        (name_of(page), language)
        for page in PAGES
        for language in re.findall(r"^```(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        if language in _CODE
    }
    run = {(page, "python") for page in RUN} | {
        (page, language) for page in COMMANDS for language in ("bash", "sh") if (page, language) in there
    }
    assert there == run | set(OWN_TESTS) | set(NOT_RUN)
    assert len(run) + len(OWN_TESTS) + len(NOT_RUN) == len(there), "listed twice"
    for (page, _), test in OWN_TESTS.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"
