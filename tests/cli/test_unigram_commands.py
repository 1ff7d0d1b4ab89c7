"""All commands with a BERT that has XLM-R's words, as multilingual MiniLM: from texts to answers, without a message."""

import json
from pathlib import Path

import numpy as np
import pytest

from bert_fast import XLMRobertaTokenizer
from bert_fast.cli import main
from bert_fast.data import TokenStore
from bert_fast.tokenization import load_tokenizer
from tests.tokenization.native_core import needs_native
from tests.tokenization.unigram_core import MARK, forms, make_state

pytestmark = needs_native

WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "who",
    "ran",
    "John",
    "Mary",
    "home",
    "fast",
    "red",
    "house",
    "hill",
    "the",
    "a",
    "to",
]
PIECES = [
    *((MARK + word, -4.0 - i) for i, word in enumerate(WORDS)),
    *((c, -9.0) for c in "abcdefghijklmnopqrstuvwxyzJM?."),
]
TASKS = {
    "classify": [{"text": "good fine house", "label": "yes"}, {"text": "bad poor hill", "label": "no"}],
    "ner": "John B-PER\nran O\nhome O\n\nthe O\nMary B-PER\n\n",
    "qa": [{"question": "who ran?", "context": "the fast Mary ran", "answers": [{"text": "Mary", "answer_start": 9}]}],
    "choice": [{"sent1": "John ran", "sent2": "to", "ending0": "home", "ending1": "hill", "label": 0}],
}  # fmt: skip


def run(*arguments: object) -> None:
    assert main.main([str(each) for each in arguments]) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tokenize` and `pretrain` make of a text and a tokenizer.json."""
    path = tmp_path_factory.mktemp("unigram")
    (path / "tokenizer.json").write_text(json.dumps(make_state(PIECES, forms()["xlm-r"])), encoding="utf-8")
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, 6)) + ("\n" if i % 4 == 3 else "") for i in range(80)]
    (path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run("tokenize", path / "texts.txt", "-o", path / "store", "--tokenizer", path / "tokenizer.json", "--quiet")
    (path / "config.json").write_text(
        json.dumps(
            {
                "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "intermediate_size": 48, "pad_token_id": 1,
            }
        )
    )  # fmt: skip
    run(
        "pretrain", "--model_name_or_path", path / "config.json", "--tokenizer_name", path / "tokenizer.json",
        "--train_file", path / "store", "--output_dir", path / "run", "--max_steps", 2, "--max_seq_length", 32,
        "--per_device_train_batch_tokens", 256, "--whole_words", "--save_strategy", "no",
    )  # fmt: skip
    assert len(TokenStore.open(path / "store", load_tokenizer(path / "run"))) == 20
    return path / "run"


def test_the_tokenizer_of_a_run(model: Path) -> None:
    """Saved as it came, but for form; and padding has the tokenizer's id."""
    state = json.loads((model / "tokenizer.json").read_text())
    assert isinstance(load_tokenizer(model), XLMRobertaTokenizer)
    assert state == make_state(PIECES, forms()["xlm-r"])
    assert json.loads((model / "config.json").read_text())["pad_token_id"] == 1


@pytest.mark.parametrize("task", TASKS)
def test_tasks(model: Path, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, suffix = TASKS[task], "conll" if task == "ner" else "jsonl"
    text = (
        rows
        if isinstance(rows, str)
        else "".join(json.dumps(row | {"id": str(i)}) + "\n" for i in range(4) for row in rows)
    )
    (tmp_path / f"train.{suffix}").write_text(text * (4 if task == "ner" else 1), encoding="utf-8")
    file, output = tmp_path / f"train.{suffix}", tmp_path / "run"
    run(
        "finetune", task, "--model_name_or_path", model, "--train_file", file, "--validation_file", file,
        "--output_dir", output, "--num_train_epochs", 1, "--save_strategy", "no",
    )  # fmt: skip
    assert isinstance(load_tokenizer(output), XLMRobertaTokenizer)
    run("predict", output, file, "--output_file", tmp_path / "said")
    run("predict", output, file, "--evaluate")
    assert (tmp_path / "said").stat().st_size > 0 and '"eval_loss"' in capsys.readouterr().out
