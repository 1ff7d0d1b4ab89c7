"""What docs/finetuning.md shows of named entities and question answering runs as it stands there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM
from bert_fast.data.conll import read_conll
from bert_fast.tokenization import BertTokenizer
from bert_fast.training import Trainer, TrainingConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "finetuning.md"
WORDS = ["john", "##son", "lives", "in", "oslo", "what", "is", "?", "a", "city", "."]


def section(title: str) -> str:
    """The Python of a section."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets take from the first section, and a model where they look for one."""
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=384,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained("path/to/model")
    Path("path/to/model/vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = BertTokenizer.from_pretrained("path/to/model")
    return {"tokenizer": tokenizer, "Trainer": Trainer, "TrainingConfig": TrainingConfig}


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
def test_named_entities(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("seqeval")
    for name in ("train.conll", "dev.conll"):
        Path(name).write_text("Johnson B-PER\nlives O\nin O\nOslo B-LOC\n\n" * 20)
    exec(section("Named entities"), given)
    assert "[CLS] john/B-PER ##son lives/O in/O oslo/B-LOC [SEP]" in capsys.readouterr().out
    result = given["trainer"].train()
    assert result.outcome == "finished" and {"f1", "precision", "recall", "accuracy", "loss"} <= set(result.metrics)
    model = type(given["model"]).from_pretrained(result.model_dir)
    assert list(model.config.id2label.values()) == ["O", "B-LOC", "B-PER"]
    predictions = given["trainer"].predict(given["valid"])
    [file] = given["task"].write_predictions(Path("said"), given["valid"], predictions)
    assert read_conll(file, label_column=1).words == ["Johnson", "lives", "in", "Oslo"] * 20


@pytest.mark.filterwarnings("ignore")
def test_question_answering(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers = [{"text": "a city", "answer_start": 8}]
    qas = [{"id": str(n), "question": "What is Oslo?", "answers": answers if n % 3 else []} for n in range(120)]
    content = {"data": [{"paragraphs": [{"context": "Oslo is a city.", "qas": qas[::-1]}]}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        Path(name).write_text(json.dumps(content))
    exec(section("Question answering"), given)
    assert "[CLS] what is oslo ? [SEP] oslo is <a city> . [SEP]" in capsys.readouterr().out
    assert given["valid"].num_questions == 100 and given["train"].num_questions == 20
    assert given["task"].may_abstain
    result = given["trainer"].train()
    assert result.outcome == "finished" and {"f1", "exact_match", "loss"} <= set(result.metrics)
