"""Files that are wrong, or made to mislead: one line says what is wrong, and the terminal obeys nothing in them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bert_fast import BertTokenizer
from bert_fast.cli import main
from tests.cli.conftest import VOCABULARY, error_of, finetune

RED = "\x1b[31mred\x1b]0;title\x07"
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        ("text\tlabel\n", None, "train.tsv: expected at least one row, got none"),
        ("", None, "train.tsv: "),
        ("words\tlabel\na\tx\n", None, "train.tsv: expected a column 'text', got 'words', 'label'"),
        ("text\tlabel\na\tx\nb\tx\n", None, "train.tsv: line 2: column 'label': expected at least two labels"),
        ("text\tlabel\na\tx\nb\n", None, "train.tsv: line 3: "),
        ("text\tlabel\na\tx\nb\t\n", None, "train.tsv: line 3: column 'label': expected a string or a whole number"),
        (b"text\tlabel\na\tx\n\xff\ty\n", None, "train.tsv: "),
        ("text\tlabel\na\tx\nb\ty\n", "text\tlabel\na\tx\na\tz\n", "valid.tsv: line 3: column 'label': expected"),
        ("text\tlabel\na\tx\nb\ty\n", "text\na\n", "valid.tsv: expected a column 'label', got 'text'"),
    ],
    ids=[
        "no row", "nothing", "no such column", "one label", "too few fields", "no label", "no UTF-8", "unseen label",
        "no labels to judge by",
    ],
)  # fmt: skip
def test_examples_that_cannot_be_learned(
    train: str | bytes, valid: str | None, message: str, tiny_model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "train.tsv").write_bytes(train if isinstance(train, bytes) else train.encode())
    if valid is not None:
        (tmp_path / "valid.tsv").write_text(valid)
    command = finetune(
        "classify", tiny_model, tmp_path / "train.tsv", tmp_path / "run",
        validation_file=None if valid is None else tmp_path / "valid.tsv",
    )  # fmt: skip
    assert error_of(command, capsys).startswith(f"{tmp_path}/{message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "task", "message"),
    [
        ("x.jsonl", '{"text": "a", "label": "x"}\n{"text": \n', "classify", "x.jsonl: line 2: "),
        ("x.jsonl", '{"text": "a", "label": "x"}\n[1]\n', "classify", "x.jsonl: line 2: "),
        pytest.param("x.jsonl", NESTED, "classify", "x.jsonl: line 1: ", id="nested"),
        ("x.parquet", "text", "classify", "x.parquet: cannot be read as Parquet: "),
        ("x.docx", "text", "classify", "x.docx: expected a file that ends in .tsv"),
        ("x.conll", "John B-PER\nran\n", "ner", "x.conll: line 2: "),
        ("x.jsonl", '{"sent1": "a", "sent2": "b", "ending0": "c", "label": 0}\n', "choice", "x.jsonl: expected a col"),
        ("x.json", '{"data": [{"paragraphs": [{"context": "a"}]}]}', "qa", "x.json: "),
    ],
)
def test_files_that_are_broken(
    name: str, content: str, task: str, message: str, tiny_model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_text(content)
    error = error_of(finetune(task, tiny_model, tmp_path / name, tmp_path / "run"), capsys)
    assert error.startswith(f"{tmp_path}/{message}")
    assert not (tmp_path / "run").exists()


def test_models_that_cannot_learn(
    tiny_model: Path, reviews: Path, damaged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    alone = shutil.copytree(tiny_model, tmp_path / "alone")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (alone / name).unlink()
    cut = shutil.copytree(tiny_model, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:1000])
    BertTokenizer([*VOCABULARY, "more"], do_lower_case=False).save_pretrained(tmp_path / "more")
    (tmp_path / "file").write_text("")
    half = shutil.copytree(tiny_model, tmp_path / "half")
    save_file({name: value for name, value in load_file(tiny_model / "model.safetensors").items() if ".1." not in name},
              half / "model.safetensors", {"format": "pt"})  # fmt: skip
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_name_or_path": tmp_path / "none"}, f"{tmp_path / 'none'}"),
        ({"model_name_or_path": tmp_path / "empty"}, f"{tmp_path / 'empty'}"),
        ({"model_name_or_path": alone}, f"{alone}"),
        ({"model_name_or_path": cut}, f"{cut}/model.safetensors"),
        ({"model_name_or_path": half}, f"{half}: expected the weights of a model, got none of bert.encoder.layer.1."),
        ({"model_name_or_path": damaged("t5", model_type="t5")}, "model_type"),
        ({"model_name_or_path": damaged("odd", hidden_size="x")}, "hidden_size"),
        ({"max_seq_length": 65}, "max_seq_length: expected at most the model's 64 positions, got 65"),
        ({"max_seq_length": 0}, "max_"),
        ({"tokenizer_name": tmp_path / "more"}, "tokenizer_name: expected at most the model's 27 tokens, got 28"),
        ({"tokenizer_name": tmp_path / "none"}, f"{tmp_path / 'none'}"),
        ({"cased": True}, f"cased: goes with a vocab.txt; {tiny_model} knows what it is"),
        ({"train_file": tmp_path / "none.tsv"}, f"No such file or directory: '{tmp_path / 'none.tsv'}'"),
        ({"train_file": tmp_path}, f"{tmp_path}: expected a file that ends in"),
        ({"output_dir": tmp_path / "file"}, "file cannot be made or written: "),
        ({"output_dir": tmp_path / "file" / "below"}, "below cannot be made or written: "),
        ({"per_device_train_batch_tokens": 4}, "max_tokens: example 3 of epoch 0 has 11 tokens, more than 4"),
        ({"eval_strategy": "steps"}, "eval_dataset"),
        ({"learning_rate": -1.0}, "lr: expected "),
        ({"fp16": True, "bf16": True}, "fp16"),
    ]
    for changes, message in cases:
        command = finetune("classify", tiny_model, reviews / "train.tsv", tmp_path / "run", **{**changes})
        model, train, output = (changes.get(name) for name in ("model_name_or_path", "train_file", "output_dir"))
        error = error_of(command, capsys)
        assert message in error, (model, train, output, error)
        assert not list(tmp_path.glob("run/*.safetensors"))


def test_a_folder_that_may_not_be_written(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the examples are read; root may write everywhere, but not below /proc."""
    place = Path("/proc/self")
    if not place.is_dir():
        pytest.skip("there is no /proc")
    error = error_of(finetune("classify", tiny_model, tmp_path / "none.tsv", place / "run"), capsys)
    assert error.startswith(f"output_dir: {place / 'run'} cannot be made or written: {place}: ")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A file whose name, texts and labels hold escape sequences."""
    file = tmp_path / "\x1b[2Jtrain.tsv"
    rows = [f"the film{RED}\t{label}" for label in (f"good{RED}", f"bad{RED}") * 20]
    file.write_text("\n".join(["text\tlabel", *rows]) + "\n", newline="\n")
    return file


def test_nothing_of_it_reaches_the_terminal(
    hostile: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "\x1b[1mrun", tmp_path / "other.tsv"
    other.write_text(f"text\tlabel\na\tx{RED}\n")
    (tmp_path / "bad.yaml").write_text('"a\\x1b[31mred": 1')
    statuses = [
        main.main(finetune("classify", tiny_model, hostile, run, validation_file=hostile)),
        main.main(finetune("classify", tiny_model, hostile, run, validation_file=other)),
        main.main(finetune("classify", tiny_model, tmp_path / RED, run)),
        main.main(finetune("classify", tmp_path / RED, hostile, run)),
        main.main(finetune("classify", tiny_model, hostile, run, config=tmp_path / "bad.yaml")),
        main.main(["predict", str(run), str(hostile), "--max_seq_length", "40"]),
        main.main(["predict", str(run), str(other), "--max_seq_length", "40", "--evaluate"]),
        main.main(["predict", str(tmp_path / RED), str(hostile)]),
        main.main(["predict", str(run), str(hostile), "--max_seq_length", "40", "--output_file", f"/{RED}/x"]),
    ]
    assert statuses == [0, 1, 1, 1, 1, 0, 1, 1, 1]
    found = capsys.readouterr()
    assert "\x1b" not in found.out + found.err and "\x07" not in found.out + found.err
    assert "\\u001b[31mred" in found.out and "\\u001b[31mred" in found.err
    answers = [json.loads(line) for line in found.out.splitlines() if line.startswith('{"')]
    assert {answer["label"] for answer in answers} <= {f"good{RED}", f"bad{RED}"} and len(answers) == 40


def test_a_name_that_is_not_utf_8(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    run = tmp_path / "\udcffrun"
    assert main.main(finetune("classify", tiny_model, reviews / "train.tsv", run)) == 0
    assert (run / "model.safetensors").exists()


def test_tokenizers_whose_files_hold_something_else(
    tiny_model: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    values = json.loads((model / "tokenizer_config.json").read_text())
    next(iter(values["added_tokens_decoder"].values()))["lstrip"] = "yes"
    (model / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "a.txt").write_text("the film\n")
    for command in (
        ["tokenize", str(tmp_path / "a.txt"), "-o", str(tmp_path / "s"), "--tokenizer", str(model)],
        finetune("classify", model, reviews / "train.tsv", tmp_path / "run"),
    ):
        assert "tokenizer_config.json: added_tokens_decoder" in error_of(command, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected the folder of a model, got one without config.json"),
        ("{", "config.json: is damaged: "),
        ("[]", "config.json: is damaged: "),
        pytest.param(NESTED, "config.json: is damaged: ", id="nested"),
        ('{"architectures": "BertModel"}', "expected a model of BertForSequenceClassification, "),
        ('{"architectures": ["BertForMaskedLM"]}', "expected a model of BertForSequenceClassification, "),
        ({"id2label": {"0": "negative", "2": "positive"}, "label2id": {"negative": 0, "positive": 2}}, "id2label"),
        ({"architectures": ["BertForQuestionAnswering"]}, "expected a fine-tuned model, got none of qa_outputs.bias"),
    ],
)
def test_models_that_cannot_be_asked(
    content: Any, message: str, runs: dict[str, Path], reviews: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = shutil.copytree(runs["classify"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    if content is None:
        os.unlink(model / "config.json")
    else:
        (model / "config.json").write_text(json.dumps(config | content) if isinstance(content, dict) else content)
    command = ["predict", str(model), str(reviews / "valid.tsv"), "--max_seq_length", "40"]
    assert message in error_of(command, capsys)
