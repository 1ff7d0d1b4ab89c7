"""Models that runs start from, and what a run is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_fast import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, BertTokenizer
from bert_fast.errors import CheckpointError, SourceError
from bert_fast.training.recipes.build import SIZES, build, load_model, load_tokenizer, make_config, new_model
from bert_fast.training.recipes.runs import phases, plan_text, run
from bert_fast.training.recipes.settings import ModelSettings, Settings, SettingsError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A masked-LM model with its tokenizer."""
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    path = tmp_path / "checkpoint"
    BertForMaskedLM(config).save_pretrained(path)
    BertTokenizer(WORDS).save_pretrained(path)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "x.tsv"
    path.write_text("text\tlabel\n" + "good\t1\nbad\t0\n" * 20)
    return path


def classify(checkpoint: Path, table: Path, **more: Any) -> Settings:
    values = {"model": str(checkpoint), "train": str(table), "output_dir": str(table.parent / "run"), "max_length": 16}
    return Settings.of("classify", values | {"steps": 2} | more)


def test_sizes_have_the_parameters_of_the_papers() -> None:
    """Of `BertModel` with the uncased English vocabulary: Turc et al. 2019 (table 1), Devlin et al. 2018."""
    millions = {"tiny": 4.4, "mini": 11.2, "small": 28.8, "medium": 41.4, "base": 109.5, "large": 335.1}
    assert millions.keys() == SIZES.keys()
    for size, expected in millions.items():
        with torch.device("meta"):
            model = BertModel(make_config(size, 30522))
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == expected
        width = model.config.hidden_size
        assert model.config.initializer_range == round(0.02 * max(1, 768 / width) ** 0.5, 4)
    with pytest.raises(ValueError, match="size: expected one of tiny, mini"):
        make_config("huge", 30522)


def test_tokenizers(checkpoint: Path, tmp_path: Path) -> None:
    assert load_tokenizer(ModelSettings(str(checkpoint))).get_vocab()["good"] == 5
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*WORDS, "Good"]))
    assert load_tokenizer(ModelSettings("tiny", str(vocabulary))).tokenize("Good") == ["good"]
    assert load_tokenizer(ModelSettings("tiny", str(vocabulary), cased=True)).tokenize("Good") == ["Good"]
    with pytest.raises(SettingsError, match="tokenizer: expected one, as there is none beside model=tiny"):
        load_tokenizer(ModelSettings("tiny"))
    with pytest.raises(SettingsError, match=r"cased: goes with a vocab\.txt"):
        load_tokenizer(ModelSettings(str(checkpoint), cased=True))


def test_an_encoder_with_a_new_head(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = BertTokenizer(WORDS)
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}}
    model = load_model(BertForSequenceClassification, checkpoint, tokenizer, 16, labels)
    stored = load_file(checkpoint / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored if name.startswith("bert."))
    assert model.config.num_labels == 3 and loaded["classifier.weight"].shape == (3, 16)
    # A head of other labels is replaced, one that must be there is missed.
    model.save_pretrained(tmp_path / "three")
    again = load_model(BertForSequenceClassification, tmp_path / "three", tokenizer, 16, {"id2label": {0: "x", 1: "y"}})
    assert again.state_dict()["classifier.weight"].shape == (2, 16)
    with pytest.raises(CheckpointError, match=r"expected a BertForSequenceClassification; missing .*classifier\.bias"):
        load_model(BertForSequenceClassification, checkpoint, tokenizer, 16, may_lack_head=False)
    name = "bert.encoder.layer.0.output.dense.weight"
    save_file({key: value for key, value in stored.items() if key != name}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected the whole encoder; .*layer\.0\.output\.dense\.weight"):
        load_model(BertForSequenceClassification, checkpoint, tokenizer, 16)


def test_a_model_for_fewer_words_or_positions_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match="max_length: expected at most the model's 32 positions, got 33"):
        load_model(BertForMaskedLM, checkpoint, BertTokenizer(WORDS), 33)
    with pytest.raises(SettingsError, match="tokenizer: expected at most the model's vocab_size=7 tokens, got 8"):
        new_model(BertForMaskedLM, str(checkpoint), BertTokenizer([*WORDS, "new"]), 16)
    assert new_model(BertForMaskedLM, "tiny", BertTokenizer(WORDS), 600).config.max_position_embeddings == 600


def test_random_weights_are_those_of_the_seed(checkpoint: Path, table: Path) -> None:
    heads = []
    for seed in (1, 1, 2):
        torch.rand(3)  # whatever happened before
        heads.append(build(classify(checkpoint, table, seed=seed)).model.state_dict()["classifier.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_share_to_judge_by_is_disjoint_and_of_the_seed(checkpoint: Path, tmp_path: Path) -> None:
    table = tmp_path / "many.tsv"
    table.write_text("text\tlabel\n" + "".join(f"{index}\t{index % 2}\n" for index in range(50)))
    found = []
    for seed in (1, 1, 2):
        task: Any = build(classify(checkpoint, table, valid_share=0.2, seed=seed)).task
        assert (len(task.train), len(task.valid)) == (40, 10)
        assert sorted(map(int, task.train.texts + task.valid.texts)) == list(range(50))
        found.append(task.valid.texts)
    assert found[0] == found[1] != found[2]
    with pytest.raises(SettingsError, match=r"valid_share: 0\.999 leaves none of 50 examples"):
        build(classify(checkpoint, table, valid_share=0.999))


def test_labels_of_validation_must_be_known(checkpoint: Path, table: Path) -> None:
    other = table.parent / "other.tsv"
    other.write_text("text\tlabel\ngood\t1\nbad\t2\n")
    with pytest.raises(SourceError, match=r"other\.tsv: line 3: expected one of the labels '0', '1', got '2'"):
        build(classify(checkpoint, table, valid=str(other)))


def test_phases() -> None:
    values = {"model": "tiny", "tokenizer": "v", "train": "t", "output_dir": "o", "long_length": 512, "steps": 1000}
    first, second = phases(Settings.of("pretrain", values))
    assert (first.training.steps, first.data.max_length, str(first.training.output_dir)) == (900, 128, "o/length-128")
    assert (second.training.steps, second.data.max_length, str(second.training.output_dir)) == (
        100,
        512,
        "o/length-512",
    )
    assert (second.model.model, second.model.tokenizer) == ("o/length-128/model", "v")
    (only,) = phases(Settings.of("pretrain", values | {"long_length": None}))
    assert only.training.steps == 1000
    first, second = phases(Settings.of("pretrain", {**values, "steps": None, "epochs": 10, "long_share": 0.25}))
    assert (first.training.epochs, second.training.epochs) == (7.5, 2.5)


def test_the_python_api(checkpoint: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_fast.training.recipes.runs.default_observers", lambda *_, **__: [])  # plots take seconds
    settings = classify(checkpoint, table, valid=str(table), precision="bf16")
    text = plan_text(settings)
    assert "40 to train on, 40 to judge by" in text and "cpu, bf16" in text
    assert not settings.training.output_dir.exists()
    result = run(settings, quiet=True)
    assert (result.outcome, result.step) == ("finished", 2)
    assert (settings.training.output_dir / "predictions" / "valid.tsv").is_file()
    with pytest.raises(SettingsError, match="precision: expected 'fp32' or 'bf16' on a CPU, got 'fp16'"):
        run(classify(checkpoint, table, precision="fp16", output_dir=str(table.parent / "other")), quiet=True)
