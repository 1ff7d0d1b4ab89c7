"""BertConfig: every published size loads, nothing is lost in a file, every wrong value is named."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.errors import CheckpointError
from bert_fast.models import config as config_module
from bert_fast.models.config import BertConfig

_COMMON = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def _sizes(hidden: int, heads: int, layers: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    return {**_COMMON, **sizes, "intermediate_size": 4 * hidden, **others}


# As published: Google's files have no model_type, some carry keys that only TensorFlow's code read.
_GOOGLE_EXTRA = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
PUBLISHED = {
    "small-50k": _sizes(256, 8, 8, vocab_size=50_100, max_position_embeddings=256),
    "base-uncased": _sizes(768, 12, 12, model_type="bert", architectures=["BertForMaskedLM"], pad_token_id=0),
    "base-cased": _sizes(768, 12, 12, vocab_size=28_996),
    "large-uncased": _sizes(1024, 16, 24),
    "chinese": _sizes(768, 12, 12, vocab_size=21_128, **_GOOGLE_EXTRA),
    "multilingual-cased": _sizes(768, 12, 12, vocab_size=119_547, **_GOOGLE_EXTRA),
    "minilm-l6": _sizes(384, 12, 6, model_type="bert", torch_dtype="float32", transformers_version="4.8.2"),
    "tiny": _sizes(128, 2, 2),
    "mini": _sizes(256, 4, 4),
    "small": _sizes(512, 8, 4),
    "medium": _sizes(512, 8, 8),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("file_name", ["config.json", "bert_config.json"])
def test_published_sizes_load_and_keep_every_key(tmp_path: Path, name: str, file_name: str) -> None:
    values = PUBLISHED[name]
    (tmp_path / file_name).write_text(json.dumps(values))
    config = BertConfig.from_pretrained(tmp_path)
    assert config == BertConfig.from_json_file(tmp_path / file_name) == BertConfig.from_pretrained(tmp_path / file_name)
    for key, value in values.items():
        if key != "torch_dtype":
            assert getattr(config, key) == value
    written = json.loads(config.to_json_string())
    expected = {("dtype" if key == "torch_dtype" else key): value for key, value in values.items()}
    assert expected.items() <= written.items()
    assert BertConfig.from_dict(written) == config


def test_config_json_wins_over_bert_config_json(tmp_path: Path) -> None:
    (tmp_path / "bert_config.json").write_text('{"vocab_size": 1}')
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    assert BertConfig.from_pretrained(tmp_path).vocab_size == 2


def test_real_minilm_config(minilm_dir: Path) -> None:
    config = BertConfig.from_pretrained(minilm_dir)
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (384, 12, 6)
    written = json.loads(config.to_json_string())
    assert json.loads((minilm_dir / "config.json").read_text()).items() <= written.items()


def test_defaults_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers").BertConfig()
    config = BertConfig()
    for name, value in vars(config).items():
        if hasattr(theirs, name):  # some names left transformers in version 5
            assert getattr(theirs, name) == value, name
    assert (config.num_labels, config.use_return_dict) == (2, True)
    ours_only = {name for name in vars(config) if not hasattr(theirs, name)}
    assert ours_only <= {"position_embedding_type", "pruned_heads"}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"hidden_size": 770}, ValueError, "hidden_size: expected a multiple of num_attention_heads=12, got 770"),
        ({"hidden_size": -768}, ValueError, "hidden_size: expected an int >= 1, got -768"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads: expected an int >= 1, got 0"),
        ({"num_hidden_layers": -1}, ValueError, "num_hidden_layers: expected an int >= 0, got -1"),
        ({"vocab_size": 100.0}, TypeError, "vocab_size: expected an int >= 1, got 100.0"),
        ({"intermediate_size": True}, TypeError, "intermediate_size: expected an int >= 1, got True"),
        ({"max_position_embeddings": "512"}, TypeError, "max_position_embeddings: expected an int >= 1, got '512'"),
        ({"type_vocab_size": 0}, ValueError, "type_vocab_size: expected an int >= 1, got 0"),
        ({"chunk_size_feed_forward": -1}, ValueError, "chunk_size_feed_forward: expected an int >= 0, got -1"),
        ({"hidden_act": "gelu_typo"}, ValueError, "hidden_act: expected one of gelu, gelu_new,.*got 'gelu_typo'"),
        ({"hidden_act": None}, TypeError, "hidden_act: expected one of"),
        ({"hidden_dropout_prob": 1.1}, ValueError, r"hidden_dropout_prob: expected a probability in \[0, 1\], got 1.1"),
        ({"hidden_dropout_prob": float("nan")}, ValueError, "hidden_dropout_prob: .*got nan"),
        ({"attention_probs_dropout_prob": -0.1}, ValueError, "attention_probs_dropout_prob: .*got -0.1"),
        ({"attention_probs_dropout_prob": "0.1"}, TypeError, "attention_probs_dropout_prob: .*got '0.1'"),
        ({"attention_probs_dropout_prob": 10**400}, ValueError, "attention_probs_dropout_prob: .*got 1000"),
        ({"classifier_dropout": 2}, ValueError, "classifier_dropout: .*got 2"),
        ({"layer_norm_eps": float("nan")}, ValueError, "layer_norm_eps: expected a finite number >= 0, got nan"),
        ({"layer_norm_eps": -1e-12}, ValueError, "layer_norm_eps: .*got -1e-12"),
        ({"initializer_range": float("inf")}, ValueError, "initializer_range: .*got inf"),
        ({"position_embedding_type": "rotary"}, ValueError, "position_embedding_type: expected one of.*got 'rotary'"),
        ({"is_decoder": 1}, TypeError, "is_decoder: expected True or False, got 1"),
        ({"pad_token_id": 30522}, ValueError, "pad_token_id: expected an id below vocab_size=30522, got 30522"),
        ({"pad_token_id": 0.0}, TypeError, "pad_token_id: expected an int or None, got 0.0"),
        ({"problem_type": "ranking"}, ValueError, "problem_type: expected one of.*got 'ranking'"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, ValueError, "num_labels >= 2, got 1"),
        ({"num_labels": 0}, ValueError, "num_labels: expected an int >= 1, got 0"),
        ({"id2label": ["a", "b"]}, TypeError, "id2label: expected a mapping"),
        ({"id2label": {"x": "a"}}, ValueError, "id2label: expected a mapping from class number to name"),
        ({"label2id": {"a": "x"}}, ValueError, "label2id: expected a mapping from class name to number"),
        ({"architectures": "BertModel"}, TypeError, "architectures: expected a list of str, got 'BertModel'"),
        ({"dtype": "float99"}, ValueError, "dtype: expected a torch.dtype or its name, got 'float99'"),
        ({"pruned_heads": {12: [0]}}, ValueError, "pruned_heads: expected layers below 12 and heads below 12"),
        ({"pruned_heads": {0: 1}}, TypeError, "pruned_heads: expected a mapping"),
        ({"model_type": "roberta"}, ValueError, "model_type: expected 'bert', got 'roberta'"),
        ({"to_dict": 1}, ValueError, "to_dict: expected a name that is no method"),
        ({"__class__": "x"}, ValueError, "__class__: expected a name"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BertConfig(**values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        BertConfig.from_pretrained(tmp_path)
    assert next(iter(values)) in str(caught.value)


def test_a_model_type_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^model_type: expected 'bert', got array"):
        BertConfig(model_type=np.zeros(2))


def test_values_are_checked_when_set_later() -> None:
    config = BertConfig()
    with pytest.raises(ValueError, match=r"hidden_dropout_prob: .*got 7"):
        config.hidden_dropout_prob = 7
    assert config.hidden_dropout_prob == 0.1
    config.hidden_size = 770
    with pytest.raises(ValueError, match="hidden_size"):
        config.validate()


def test_accepted_spellings() -> None:
    config = BertConfig(hidden_size=np.int64(24), hidden_dropout_prob=0, dtype="torch.float16", vocab_size=100)
    assert type(config.hidden_size) is int and type(config.hidden_dropout_prob) is float
    assert config.dtype is torch.float16 and BertConfig(torch_dtype="bfloat16").dtype is torch.bfloat16
    assert BertConfig(id2label=None, label2id=None, pruned_heads=None, return_dict=None) == BertConfig()
    assert BertConfig(pruned_heads={"3": [5, 1, 5]}).pruned_heads == {3: [1, 5]}
    assert BertConfig(pad_token_id=None).pad_token_id is None
    assert BertConfig(hidden_act=torch.tanh).hidden_act is torch.tanh


def test_labels() -> None:
    config = BertConfig(num_labels=3)
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"} and config.label2id["LABEL_2"] == 2
    assert BertConfig(id2label={"0": "no", "1": "yes"}).label2id == {"no": 0, "yes": 1}
    assert BertConfig(label2id={"no": 0, "yes": 1, "?": 2}).num_labels == 3
    config.num_labels = 5
    assert config.num_labels == len(config.label2id) == 5
    with pytest.warns(UserWarning, match="num_labels=7 is ignored"):
        assert BertConfig(num_labels=7, id2label={0: "a"}).num_labels == 1


def test_labels_that_only_one_mapping_names_come_back(tmp_path: Path) -> None:
    """id2label as it is by default used to be left out of the file, and the count was then that of label2id."""
    config = BertConfig(id2label={0: "LABEL_0", 1: "LABEL_1"}, label2id={"a": 0})
    config.save_pretrained(tmp_path)
    assert BertConfig.from_pretrained(tmp_path) == config


def test_overrides(tmp_path: Path) -> None:
    BertConfig(num_labels=2, id2label={0: "no", 1: "yes"}, colour="blue", dtype="float16").save_pretrained(tmp_path)
    assert BertConfig.from_pretrained(tmp_path, num_labels=2).id2label == {0: "no", 1: "yes"}
    assert BertConfig.from_pretrained(tmp_path, num_labels=4).label2id["LABEL_3"] == 3
    assert BertConfig.from_pretrained(tmp_path, id2label={0: "a", 1: "b", 2: "c"}).label2id == {"a": 0, "b": 1, "c": 2}
    config = BertConfig.from_pretrained(tmp_path, hidden_dropout_prob=0.0, colour="red", torch_dtype="float32")
    assert (config.hidden_dropout_prob, config.colour, config.dtype) == (0.0, "red", torch.float32)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="no field hiden_size"):
        BertConfig.from_pretrained(tmp_path, hiden_size=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"vocab_size": 30', "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'{"layer_norm_eps": NaN}', "layer_norm_eps: expected a finite number >= 0, got nan"),
        (b'{"vocab_size": 5, "vocab_size": 6}', "cannot be read as JSON: vocab_size has two values"),
        (b'{"note": ' + b"[" * 60 + b"]" * 60 + b"}", "cannot be read as JSON: note: expected at most 50 levels"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        BertConfig.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)


# JSON values in place of right ones.
MUTATIONS = [
    *("null", "true", "false", "NaN", "Infinity", "-Infinity", "-1", "0", "1", "1.5", "1e400", "2147483648", "1" * 400),
    *(
        '""',
        '"x"',
        '"float32"',
        '"Tensor"',
        '"\\ud800"',
        f'"{"x" * 10**5}"',
        "[]",
        "[1]",
        "[null]",
        "[" * 100 + "]" * 100,
    ),
    *("{}", '{"a":1}', '{"a":1e400}', '{"a":NaN}', '{"a":1.5}', '{"a":[]}', '{"0":null}', '{"0":[1]}', '{"0":{}}'),
    *('{"0":[99]}', '{"0":[-1]}', '{"0":[true]}', '{"-1":"a"}', '{"1e3":"a"}', '{"0":"a","00":"b"}'),
    json.dumps([7] * 10**5),
]
# Fields whose values others must fit.
RELATED = {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}


@pytest.mark.filterwarnings("ignore:num_labels=1 is ignored")
@pytest.mark.parametrize("field", [*vars(BertConfig()), "num_labels", "torch_dtype", "model_type", "__dict__", "note"])
def test_mutated_files(tmp_path: Path, field: str) -> None:
    """A field that holds anything is named in a short message, or makes a configuration that can be used and saved."""
    path, num_refused = tmp_path / "config.json", 0
    values = json.loads(BertConfig(pruned_heads={0: [1]}, id2label={0: "no", 1: "yes"}).to_json_string())
    for value in MUTATIONS:
        entries = [f"{json.dumps(name)}: {json.dumps(old)}" for name, old in values.items() if name != field]
        path.write_text("{" + ", ".join([*entries, f"{json.dumps(field)}: {value}"]) + "}")
        try:
            config = BertConfig.from_pretrained(path)
        except CheckpointError as error:
            message, num_refused = str(error), num_refused + 1
            assert message.startswith(f"{path}: ") and len(message) < len(str(path)) + 500
            assert field in message or field in RELATED
            continue
        if field == "note" and any(part in value for part in ("NaN", "Infinity", "1e400", "ud800")):
            with pytest.raises(ValueError, match=r"^note: a value cannot be written to JSON"):
                config.to_json_string()
        else:
            assert BertConfig.from_dict(json.loads(config.to_json_string())) == config
    assert num_refused >= (1 if field == "note" else 15)


def test_sizes_that_nothing_has() -> None:
    with pytest.raises(ValueError, match="vocab_size: expected an int <= 2147483647, got a very large int"):
        BertConfig(vocab_size=10**5000)
    with pytest.raises(
        ValueError, match=r"num_labels: expected at most 1048576 classes without names .*got 1000000000"
    ):
        BertConfig(num_labels=10**9)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither config\.json nor bert_config\.json"):
        BertConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"^bert-base-uncased: no such file or directory$"):
        BertConfig.from_pretrained("./bert-base-uncased")
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            BertConfig.from_pretrained(name)


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BertConfig(vocab_size=5).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()

    def fill_the_disk(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            BertConfig().save_pretrained(tmp_path)
    for bad in (BertConfig(hidden_act=torch.tanh), BertConfig(note=float("nan")), BertConfig(note={1, 2})):
        with pytest.raises(ValueError, match="JSON"):
            bad.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_copies_are_independent() -> None:
    config = BertConfig(note={"a": [1]})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), BertConfig.from_hf(config)):
        assert other == config and other is not config
        other.note["a"].append(2)
        assert other != config
    values = {"note": {"a": [1]}}
    BertConfig.from_dict(values).note["a"].append(2)  # type: ignore[attr-defined]
    config.to_dict()["note"]["a"].append(2)
    assert values == {"note": {"a": [1]}} and config.note == {"a": [1]}  # type: ignore[attr-defined]


def test_repr_shows_values() -> None:
    assert "hidden_size=768" in repr(BertConfig(hidden_act=torch.tanh))


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_opens_what_we_save(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = BertConfig(**PUBLISHED[name], architecture_note="kept", num_labels=3, classifier_dropout=0.2)
    config.save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is transformers.BertConfig
    for key, value in vars(config).items():
        if key != "pruned_heads":
            assert getattr(theirs, key) == value, key
    assert theirs.num_labels == 3


def test_opens_what_transformers_saves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertConfig(
        hidden_size=64,
        num_attention_heads=4,
        id2label={0: "a", 1: "b", 2: "c"},
        label2id={"a": 0, "b": 1, "c": 2},
        problem_type="multi_label_classification",
        output_attentions=True,
        dtype="bfloat16",
        colour="blue",
        is_decoder=True,
    )
    theirs.save_pretrained(tmp_path)
    saved, live = BertConfig.from_pretrained(tmp_path), BertConfig.from_hf(theirs)
    for config in (saved, live):
        assert (config.hidden_size, config.num_labels, config.is_decoder) == (64, 3, True)
        assert config.dtype is torch.bfloat16 and config.colour == "blue"  # type: ignore[attr-defined]
        assert config.problem_type == "multi_label_classification"
        assert config.output_attentions
        assert not [name for name in vars(config) if name.startswith("_")]
    with pytest.raises(ValueError, match="model_type: expected 'bert', got 'roberta'"):
        BertConfig.from_hf(transformers.RobertaConfig())
    with pytest.raises(TypeError, match="config: expected a transformers BertConfig, got dict"):
        BertConfig.from_hf({})


def test_every_field_is_checked() -> None:
    assert set(vars(BertConfig())) == set(config_module.FIELD_CHECKS)
