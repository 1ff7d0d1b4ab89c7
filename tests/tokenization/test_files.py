"""Directories: what we write, transformers and tokenizers read with the same behaviour, and the other way round."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_fast.tokenization import AddedToken, BertTokenizer

from .test_call import SENTENCES, same

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = [*SENTENCES, "a NewTok <e> x<r> y Żółć", "single asingle", "\u2028 今天 \u2029 e\u0301"]


def changed(tokenizer: Any, added_token: Any) -> Any:
    """Adds tokens of every kind."""
    tokenizer.add_tokens(["NewTok", added_token("<r>", rstrip=True), added_token("single", single_word=True)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>"]})
    return tokenizer


@pytest.mark.parametrize(
    ("vocabulary", "options"),
    [
        ("bert-base-uncased", {}),
        ("bert-base-cased", {"do_lower_case": False}),
        ("bert-base-chinese", {"do_lower_case": False, "tokenize_chinese_chars": False}),
        ("bert-base-multilingual-cased", {"do_lower_case": False, "strip_accents": True, "model_max_length": 512}),
        ("bert-base-uncased", {"strip_accents": False, "padding_side": "left", "truncation_side": "left"}),
    ],
    ids=["uncased", "cased", "chinese", "multilingual", "left"],
)
def test_round_trips(
    vocabulary: str, options: dict[str, Any], ours: Callable[..., BertTokenizer], shared_data: Path, tmp_path: Path
) -> None:
    original = BertTokenizer(shared_data / "vocab" / vocabulary / "vocab.txt", **options)
    changed(original, AddedToken)
    written = original.save_pretrained(tmp_path / "new" / "directory")
    assert sorted(Path(name).name for name in written) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    directory = Path(written[0]).parent
    assert sorted(map(str, directory.iterdir())) == sorted(written)  # no temporary files
    vocab_file = shared_data / "vocab" / vocabulary / "vocab.txt"
    assert (directory / "vocab.txt").read_bytes() == vocab_file.read_bytes()

    again = BertTokenizer.from_pretrained(directory)
    for call in ({}, {"padding": True, "truncation": True, "max_length": 12, "return_offsets_mapping": True}):
        same(again(TEXTS, **call), original(TEXTS, **call))
    assert again.get_vocab() == original.get_vocab()
    assert again.added_tokens_decoder == original.added_tokens_decoder
    assert again.special_tokens_map == original.special_tokens_map
    assert again.extra_special_tokens == ["<e>"]
    assert again.model_max_length == original.model_max_length
    assert (again.padding_side, again.truncation_side) == (original.padding_side, original.truncation_side)

    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    mine = original(TEXTS)
    for row, expected in enumerate(library.encode_batch(TEXTS)):
        assert mine["input_ids"][row] == expected.ids
        assert mine[row].offsets == expected.offsets
        assert mine[row].word_ids == expected.word_ids
    pair = library.encode(TEXTS[0], TEXTS[4])
    assert original(TEXTS[0], TEXTS[4])["token_type_ids"] == pair.type_ids

    for loader in (transformers.BertTokenizerFast, transformers.AutoTokenizer):
        other = loader.from_pretrained(str(directory))
        for call in ({}, {"padding": True, "truncation": True, "max_length": 12, "return_offsets_mapping": True}):
            expected = other(TEXTS, **call)
            actual = original(TEXTS, **call)
            assert set(actual) == set(expected)
            assert all(actual[key] == expected[key] for key in expected)
        assert len(other) == len(original)
        assert other.get_vocab() == original.get_vocab()
        assert other.all_special_tokens == original.all_special_tokens
        assert other.model_max_length == original.model_max_length
        assert other.decode(actual["input_ids"][0]) == original.decode(actual["input_ids"][0])


@pytest.mark.parametrize("vocabulary", ["bert-base-uncased", "bert-base-chinese"])
def test_directories_of_transformers(vocabulary: str, use_engine: str, shared_data: Path, tmp_path: Path) -> None:
    lower = vocabulary.endswith("uncased")
    other = transformers.BertTokenizerFast.from_pretrained(
        str(shared_data / "vocab" / vocabulary), do_lower_case=lower, model_max_length=77, padding_side="left"
    )
    changed(other, tokenizers.AddedToken)
    other.save_pretrained(tmp_path)
    mine = BertTokenizer.from_pretrained(tmp_path)
    for call in ({}, {"padding": "max_length", "truncation": True}):
        expected = other(TEXTS, **call)
        actual = mine(TEXTS, **call)
        assert all(actual[key] == expected[key] for key in expected)
    assert mine.get_vocab() == other.get_vocab()
    assert mine.all_special_tokens == other.all_special_tokens
    assert mine.model_max_length == 77


def test_stored_truncation_and_padding_are_not_applied(minilm_dir: Path, use_engine: str) -> None:
    state = json.loads((minilm_dir / "tokenizer.json").read_text(encoding="utf-8"))
    assert state["truncation"]["max_length"] == 128  # the file does carry them
    assert state["padding"]["strategy"] == {"Fixed": 128}
    mine, other = BertTokenizer.from_pretrained(minilm_dir), transformers.BertTokenizerFast.from_pretrained(minilm_dir)
    texts = ["a b", "word " * 700]
    same(mine(texts), other(texts))
    assert [len(row) for row in mine(texts)["input_ids"]] == [4, 702]
    same(mine(texts, padding=True, truncation=True), other(texts, padding=True, truncation=True))
    assert mine.model_max_length == 512


def test_single_files(minilm_dir: Path) -> None:
    directory = BertTokenizer.from_pretrained(minilm_dir)
    for name in ("tokenizer.json", "vocab.txt"):
        single = BertTokenizer.from_pretrained(minilm_dir / name)
        assert single(list(SENTENCES)) == directory(list(SENTENCES))
        assert single.model_max_length > 10**20  # only tokenizer_config.json says it


def test_a_vocabulary_alone_means_lower_case(shared_data: Path) -> None:
    directory = shared_data / "vocab" / "bert-base-cased"
    assert BertTokenizer.from_pretrained(directory).do_lower_case
    assert not BertTokenizer.from_pretrained(directory, do_lower_case=False).do_lower_case


def test_arguments_win_over_files_and_config_over_tokenizer_json(minilm_dir: Path, tmp_path: Path) -> None:
    BertTokenizer.from_pretrained(minilm_dir, do_lower_case=False).save_pretrained(tmp_path)
    assert not BertTokenizer.from_pretrained(tmp_path / "tokenizer.json").do_lower_case
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["do_lower_case"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert not BertTokenizer.from_pretrained(tmp_path).do_lower_case
    config["do_lower_case"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert BertTokenizer.from_pretrained(tmp_path).do_lower_case
    assert not BertTokenizer.from_pretrained(tmp_path, do_lower_case=False).do_lower_case


def test_older_files(shared_data: Path, tmp_path: Path) -> None:
    """special_tokens_map.json with objects, added_tokens.json, BertProcessing, no type in the model."""
    vocab = (shared_data / "vocab" / "bert-base-uncased" / "vocab.txt").read_bytes()
    (tmp_path / "vocab.txt").write_bytes(vocab.replace(b"[MASK]\n", b"<mask>\n"))
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}), encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"newtok": 30522}), encoding="utf-8")
    tokenizer = BertTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.mask_token, tokenizer.mask_token_id, len(tokenizer)) == ("<mask>", 103, 30523)
    encoding = tokenizer("a   <mask> newtok", return_offsets_mapping=True)
    assert encoding["offset_mapping"][2] == (1, 10)  # lstrip takes the spaces along
    assert encoding["input_ids"][2:4] == [103, 30522]

    tokenizer.save_pretrained(tmp_path / "second")
    path = tmp_path / "second" / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    del state["model"]["type"]
    state["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}
    path.write_text(json.dumps(state), encoding="utf-8")
    same(BertTokenizer.from_pretrained(tmp_path / "second")("a <mask>"), tokenizer("a <mask>"))


def test_unknown_keys_are_kept(minilm_dir: Path, tmp_path: Path) -> None:
    BertTokenizer.from_pretrained(minilm_dir).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "something_else": [1, 2]}), encoding="utf-8")
    BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["something_else"] == [1, 2]


def test_never_split_survives(shared_data: Path, use_engine: str, tmp_path: Path) -> None:
    vocab = shared_data / "vocab" / "bert-base-uncased" / "vocab.txt"
    tokenizer = BertTokenizer(vocab, never_split=["[unused1]"])
    assert tokenizer.tokenize("a [unused1] b") == ["a", "[unused1]", "b"]
    assert BertTokenizer(vocab).tokenize("[unused1]") == ["[", "unused", "##1", "]"]
    tokenizer.save_pretrained(tmp_path)
    assert BertTokenizer.from_pretrained(tmp_path).tokenize("[unused1]") == ["[unused1]"]


def test_save_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "vocab" / "bert-base-chinese" / "vocab.txt"
    (path,) = BertTokenizer(source).save_vocabulary(tmp_path, filename_prefix="zh")
    assert Path(path).name == "zh-vocab.txt"
    assert Path(path).read_bytes() == source.read_bytes()
    with pytest.raises(NotADirectoryError, match="there is no directory"):
        BertTokenizer(source).save_vocabulary(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="is a file"):
        BertTokenizer(source).save_pretrained(path)
    with pytest.raises(ValueError, match="push_to_hub: nothing is uploaded from here"):
        BertTokenizer(source).save_pretrained(tmp_path, push_to_hub=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "expected a WordPiece model, got BPE"),
        ({"normalizer": {"type": "NFC"}}, "expected the normalizer BertNormalizer, got NFC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "expected the pre-tokenizer BertPreTokenizer, got Whitespace"),
        ({"post_processor": {"type": "ByteLevel"}}, r"post-processor that makes \[CLS\] A \[SEP\], got ByteLevel"),
    ],
)
def test_tokenizers_that_are_not_berts(edit: dict[str, Any], message: str, minilm_dir: Path, tmp_path: Path) -> None:
    state = json.loads((minilm_dir / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, **edit}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        BertTokenizer.from_pretrained(tmp_path)


def test_unreadable_directories(minilm_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^bert-base-uncased: no such file or directory$"):
        BertTokenizer.from_pretrained("./bert-base-uncased")
    with pytest.raises(FileNotFoundError, match=r"holds neither tokenizer\.json nor vocab\.txt"):
        BertTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((minilm_dir / "tokenizer.json").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid JSON"):
        BertTokenizer.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'do_lowercase'"):
        BertTokenizer.from_pretrained(minilm_dir, do_lowercase=True)
    assert BertTokenizer.from_pretrained(minilm_dir, use_fast=True, local_files_only=True).do_lower_case
