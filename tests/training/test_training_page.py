"""What docs/training.md shows runs as it stands there, and the settings of the examples are settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM
from bert_fast.cli import main
from bert_fast.training.recipes.settings import Settings, read_yaml, settings_fields

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained("path/to/model")
    Path("path/to/model/vocab.txt").write_text("\n".join(WORDS) + "\n")
    for name in ("train.tsv", "dev.tsv"):
        Path(name).write_text("sentence\tlabel\n" + "good film\tpos\nbad film\tneg\n" * 10)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # a head that a masked-LM checkpoint lacks
def test_python(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for module in ("recipes.runs", "trainer"):  # plots take seconds
        monkeypatch.setattr(f"bert_fast.training.{module}.default_observers", lambda *_, **__: [])
    given: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), given)
    out = capsys.readouterr().out
    assert "examples     20 to train on, 20 to judge by (by accuracy)" in out and out.count("first batch  ") == 1
    assert given["result"].outcome == "finished"
    assert set(given["metrics"]) >= {"loss", "accuracy"}


def test_yaml(folder: Path) -> None:
    pytest.importorskip("yaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    Path("run.yaml").write_text(block)
    settings = Settings.load("classify", "run.yaml", {"epochs": "4"})
    assert (settings.training.epochs, settings.training.learning_rate) == (4.0, 3e-5)


def test_flags_of_the_commands_are_there() -> None:
    """Every command of the page is understood as far as its flags go."""
    commands = [
        line for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()
    ]
    words = [line.split("bert-fast ", 1)[1].split() for line in commands if "bert-fast " in line]
    assert len(words) >= 5
    for command in words:
        assert command[0] in main.COMMANDS
        if command[0] in ("pretrain", "finetune"):
            task = "pretrain" if command[0] == "pretrain" else command[1]
            flags = {word[2:].replace("-", "_") for word in command if word.startswith("--")} - {"config"}
            assert flags <= settings_fields(task).keys()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    pytest.importorskip("yaml")
    task = read_yaml(path).get("task")
    assert task is not None, "an example says of which task it is"
    Settings.load(task, path, {})
