"""`bert-fast pretrain`: from sizes, files and folders; runs that are killed, or shared by processes."""

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bert_fast import BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from bert_fast.cli import main
from bert_fast.cli.pretrain import SIZES, make_config
from bert_fast.data import tokenize_files
from tests.cli.conftest import error_of, flags
from tests.cli.processes import killed, of_several
from tests.process_server import run


def pretrain(model: Path | str, corpus: Path, output: Path, **changes: Any) -> list[str]:
    values: dict[str, Any] = dict(
        model_name_or_path=model, train_file=corpus / "train.txt", output_dir=output, max_seq_length=24, max_steps=4,
        learning_rate=1e-2, per_device_train_batch_tokens=256, logging_steps=2, save_strategy="no",
    )  # fmt: skip
    return ["pretrain", *flags(**values | changes)]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_it_learns_and_says_what_from(
    tiny_model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = pretrain(tiny_model, corpus, tmp_path, validation_file=corpus / "valid.txt", max_steps=60)
    assert main.main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{tmp_path}: 60 steps; eval_loss ") and "eval_next_sentence_accuracy" in last
    found = json.loads((tmp_path / "eval_results.json").read_text())
    assert found["eval_loss"] == pytest.approx(found["eval_masked_lm"] + found["eval_next_sentence"])
    assert found["eval_masked_lm"] < found["eval_unigram_entropy"]
    assert isinstance(BertForPreTraining.from_pretrained(tmp_path).config, BertConfig)
    assert BertTokenizer.from_pretrained(tmp_path).get_vocab() == BertTokenizer.from_pretrained(tiny_model).get_vocab()


def test_what_a_model_may_start_from(
    tiny_model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size, a config.json, a folder; text, and a store of its tokens: the same examples."""
    monkeypatch.setitem(SIZES, "tiny", (1, 64))
    tokenizer = BertTokenizer.from_pretrained(tiny_model)
    tokenize_files([corpus / "train.txt"], tmp_path / "store", tokenizer)
    words = {"tokenizer_name": tiny_model, "next_sentence": False, "max_steps": 2}
    for name, model, more in (
        ("size", "tiny", {}),
        ("file", tiny_model / "config.json", {}),
        ("folder", tiny_model, {}),
        ("store", tiny_model, {"train_file": tmp_path / "store"}),
    ):
        assert main.main(pretrain(model, corpus, tmp_path / name, **words, **more)) == 0
        assert isinstance(BertForMaskedLM.from_pretrained(tmp_path / name), BertForMaskedLM)
    config = BertConfig.from_pretrained(tmp_path / "size")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 1, len(tokenizer))
    assert weights(tmp_path / "folder") == weights(tmp_path / "store") != weights(tmp_path / "file")
    assert not (tmp_path / "store" / "tokens").exists() and (tmp_path / "folder" / "tokens" / "train").exists()


def test_sizes() -> None:
    for size, range_ in (("tiny", 0.049), ("base", 0.02), ("large", 0.02)):
        config = make_config(size, 100, max_position_embeddings=64)
        assert (config.num_hidden_layers, config.hidden_size) == SIZES[size]
        assert config.num_attention_heads * 64 == config.hidden_size and config.initializer_range == range_
        assert (config.vocab_size, config.max_position_embeddings) == (100, 64)
    with pytest.raises(ValueError, match="size: expected one of"):
        make_config("huge", 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": "huge"}, "expected one of tiny, mini, small, medium, base, large, a config.json or a"),
        ({"model_name_or_path": "tiny", "tokenizer_name": None}, "tokenizer_name: expected one, as none lies beside"),
        ({"max_seq_length": 65}, "max_seq_length: expected at most the model's 64 positions, got 65"),
        ({"train_file": "none.txt"}, "No such file or directory: 'none.txt'"),
        ({"train_file": ["store", "store"]}, "train_file: expected text files, or one token store, got store, store"),
        ({"train_file": "store"}, "store"),
        ({"train_file": "one.txt"}, "next-sentence prediction needs at least 2 documents"),
        ({"train_file": "blank.txt"}, "blank.txt: expected text, got none that makes tokens"),
        ({"train_file": "latin.txt"}, "latin.txt: "),
        ({"train_file": "bad.jsonl"}, "bad.jsonl"),
        ({"mlm_probability": 1.5}, "mask_probability: expected "),
        ({"cased": True}, "cased: goes with a vocab.txt"),
        ({"tokenizer_name": "vocab.txt"}, "tokenizer_name: expected at most the model's 27 tokens, got 40"),
        ({"output_dir": "one.txt"}, "output_dir: one.txt cannot be made or written: "),
    ],
)
def test_what_cannot_be_done_is_one_line(
    changes: dict[str, Any], message: str, tiny_model: Path, corpus: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("store").mkdir()
    Path("one.txt").write_text("John lives in Oslo .\nMary ran .\n")
    Path("blank.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"John lives\nin \xe4 .\n")
    Path("bad.jsonl").write_text('{"text": "John lives"}\n{"text": \n')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(35))]
    Path("vocab.txt").write_text("\n".join(words))
    values = {"tokenizer_name": tiny_model, "model_name_or_path": tiny_model} | changes
    assert message in error_of(pretrain(values.pop("model_name_or_path"), corpus, Path("run"), **values), capsys)
    assert not list(tmp_path.glob("run/*.safetensors"))


def test_a_file_without_text_is_not_in_the_way_of_another(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n")
    assert main.main(pretrain(tiny_model, corpus, tmp_path / "run", train_file=tmp_path / "blank.txt")) == 1
    assert main.main(pretrain(tiny_model, corpus, tmp_path / "run")) == 0


def test_a_killed_run_goes_on_to_the_same_bits(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a step, with dropout; the same command then ends as if nothing had been."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.1}))
    torch.set_num_threads(1)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    command = pretrain(model, corpus, tmp_path / "run", **options)
    assert run(killed, command, 4, folder=tmp_path).returncode == -9
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert main.main(command) == 0
    assert main.main(pretrain(model, corpus, tmp_path / "whole", **options)) == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_two_processes_are_one(tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    """They compute what one does with twice the accumulation; only the first talks."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = pretrain(tiny_model, corpus, tmp_path / "two", validation_file=corpus / "valid.txt")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(run, of_several, command, rank, port, folder=folder) for rank, folder in enumerate(folders)
        ]
    first, second = (each.result() for each in done)
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr, second.stderr)
    assert first.stdout.count(": 4 steps; ") == 1 and second.stdout == "" and "bert-fast" not in second.stderr
    alone = pretrain(tiny_model, corpus, tmp_path / "one", gradient_accumulation_steps=2)
    assert main.main([*alone, *flags(validation_file=corpus / "valid.txt")]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    start = load_file(tiny_model / "model.safetensors")
    for name in start:  # sums in another order: far less than what training changed
        if name in one and not name.endswith("key.bias"):  # whose gradient is nothing but rounding
            assert (one[name] - two[name]).norm() < (one[name] - start[name]).norm() / 100, name
    found = [json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("one", "two")]
    assert found[0]["eval_masked_accuracy"] == found[1]["eval_masked_accuracy"]
