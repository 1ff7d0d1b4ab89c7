"""What README and the migration page show runs as it stands there, and README keeps to a page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import bert_fast
from bert_fast import ops
from bert_fast.cli import main
from tools.site import public_names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "another"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small masked-LM model and its vocabulary."""
    config = bert_fast.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path / "my-model"
    bert_fast.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "bert-base-uncased").symlink_to(folder)  # on the hub, which no test asks
    return folder


def _blocks(text: str, language: str) -> str:
    """All code of a page in a language, behind one another."""
    blocks = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    assert blocks, f"the page shows no {language}"
    return "\n".join(blocks)


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
def test_python_of_readme_runs_as_written(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.chdir(checkpoint.parent)
    names: dict[str, Any] = {}
    exec(_blocks(README, "python"), names)
    assert names["hidden"].shape == (8, 16) and names["vectors"].shape == (2, 16)


@pytest.mark.filterwarnings("ignore")
def test_commands_of_readme_run_as_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    pytest.importorskip("transformers", minversion="5")
    torch.set_num_threads(1)
    Path("vocab.txt").write_text("\n".join(WORDS) + "\n")
    Path("books.txt").write_text("a short text\nanother text\n\n" * 40)
    rows = [f"{('a short text', 'another text')[index % 2]}\t{('good', 'bad')[index % 2]}\n" for index in range(64)]
    Path("reviews.tsv").write_text("text\tlabel\n" + "".join(rows))
    Path("new.tsv").write_text("text\na text\n")
    commands = _blocks(README, "bash").replace("\\\n", "").strip().splitlines()
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "bert-fast"
        assert main.main(arguments) == 0, capsys.readouterr().err
    assert len(commands) >= 4 and Path("new/model.safetensors").is_file()


def test_readme_keeps_to_a_page() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]
    families = ("BERT", "RoBERTa", "XLM-R", "CamemBERT", "DistilBERT", "ELECTRA", "MPNet")
    words = ("`Trainer`", "GPU", "CPU", "same outcomes", "Not for", "pip install", "bert-fast bench", "make demo")
    code = ('from_pretrained("bert-base-uncased")', "bert_fast.fuse(model)")
    missing = [word for word in (*families, *words, *code) if word not in "\n".join(lines[:30])]
    assert not missing, f"not on the first screen: {missing}"
    assert "speed_gpu.svg" in "\n".join(lines[:35]) and "| memory of a step" in "\n".join(lines[:40])


def test_no_sentence_of_readme_has_more_than_two_figures() -> None:
    prose = re.sub(r"```.*?```|^\|.*?$|\]\([^)]*\)", "", README, flags=re.DOTALL | re.MULTILINE)
    sentences = re.split(r"[.:;]\s|\n\n|\n- ", prose)
    assert len(sentences) > 30
    assert not [one for one in sentences if len(re.findall(r"(?<![A-Za-z`-])\d[\d.,]*", one)) > 2]


def test_targets_that_pages_name_are_there() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    named = {name for page in pages for name in re.findall(r"(?:`|run: )make ([a-z-]+)", page.read_text("utf-8"))}
    named |= set(re.findall(r"^make ([a-z-]+)", _blocks(README, "sh"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_every_public_name_is_on_its_page() -> None:
    assert public_names.PAGE.read_text(encoding="utf-8") == public_names.render(), (
        "run `python -m tools.site.public_names --write`"
    )
    for part in public_names.PARTS:
        module = __import__(part.module, fromlist=["__all__"])
        listed = [name.name for name in public_names.public_names(part)]
        assert listed == [name for name in module.__all__ if not name.startswith("__")]
        assert all(hasattr(module, name) for name in listed)


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\S+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
def test_migration_page_runs(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    input_ids = torch.randint(5, len(WORDS), (2, 6))
    coords = torch.cartesian_prod(torch.arange(2), torch.arange(6)).int()
    given: dict[str, Any] = dict(
        path=checkpoint, input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=input_ids,
        x=torch.randn(12, 16), residual=torch.randn(12, 16), weight=torch.ones(16), bias=torch.zeros(16),
        coords=coords, seed=torch.tensor([1]), ops=ops,
    )  # fmt: skip
    exec(_blocks((ROOT / "docs" / "migration.md").read_text(encoding="utf-8"), "python"), given)
