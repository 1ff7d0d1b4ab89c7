"""from_pretrained and save_pretrained of our models; `test_common.py` has the round trip of every class."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_fast import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from bert_fast.errors import CheckpointError
from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig

Make = Callable[..., nn.Module]


def same_values(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return a.state_dict().keys() == theirs.keys() and all(
        torch.equal(value, theirs[key]) for key, value in a.state_dict().items()
    )


@pytest.fixture
def directory(make_hf: Make, tmp_path: Path) -> Path:
    """A pre-training checkpoint written by transformers."""
    make_hf("BertForPreTraining").save_pretrained(tmp_path / "pretraining")
    return tmp_path / "pretraining"


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForPreTraining])
def test_untied_round_trip(make_hf: Make, tmp_path: Path, cls: type[BertForMaskedLM]) -> None:
    """Untied, transformers keeps two biases and adds the decoder's; that is the one which must come through."""
    transformers = pytest.importorskip("transformers")
    theirs = make_hf(cls.__name__, tie_word_embeddings=False).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = cls.from_pretrained(tmp_path / "theirs")
    predictions = theirs.cls.predictions  # type: ignore[union-attr]
    assert torch.equal(model.cls.predictions.decoder.bias, predictions.decoder.bias)
    assert torch.equal(model.cls.predictions.decoder.weight, predictions.decoder.weight)
    model.save_pretrained(tmp_path / "ours")
    back, info = getattr(transformers, cls.__name__).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(12)[None]
    assert torch.equal(back(ids)[0], theirs(ids)[0])


def test_warns_by_name(directory: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"BertModel from .*: in the file, not used: .*cls\.seq_relationship\."
    ) as caught:
        BertModel.from_pretrained(directory)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(
        UserWarning, match=r"initial values: classifier\.weight, classifier\.bias; in the file, not used"
    ):
        model = BertForSequenceClassification.from_pretrained(directory, num_labels=4)
    assert model.classifier.weight.shape == (4, 16) and model.config.num_labels == 4
    assert model.classifier.weight.std() < 0.1  # drawn from normal(0, 0.02), not left over


def test_another_number_of_labels(make_hf: Make, tmp_path: Path) -> None:
    make_hf("BertForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"classifier\.weight: expected \[5, 16\], got \[3, 16\]"):
        BertForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    with pytest.warns(UserWarning, match=r"of another shape, .*classifier\.bias: expected \[5\], got \[3\]"):
        model = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.classifier.out_features == 5


@pytest.mark.filterwarnings("ignore:BertModel from")
def test_arguments(directory: Path) -> None:
    model = BertModel.from_pretrained(
        directory, add_pooling_layer=False, hidden_dropout_prob=0.0, local_files_only=True, attn_implementation="sdpa"
    )
    assert model.pooler is None and model.config.hidden_dropout_prob == 0.0
    with pytest.raises(TypeError, match="BertConfig has no field hiden_dropout_prob"):
        BertModel.from_pretrained(directory, hiden_dropout_prob=0.0)
    with pytest.raises(ValueError, match="hidden_dropout_prob: expected a probability"):
        BertModel.from_pretrained(directory, hidden_dropout_prob=2.0)
    config = BertConfig.from_pretrained(directory)
    model = BertModel.from_pretrained(directory, config=config, num_labels=7)
    assert model.config.num_labels == 7 and config.num_labels == 2
    hf_config = pytest.importorskip("transformers").BertConfig.from_pretrained(directory)
    assert BertModel.from_pretrained(directory, config=hf_config).config.hidden_size == 16
    assert BertModel.from_pretrained(directory / "model.safetensors").config.vocab_size == 31


@pytest.mark.filterwarnings("ignore:BertModel from")
def test_dtype(make_hf: Make, directory: Path, tmp_path: Path) -> None:
    assert BertModel.from_pretrained(directory).dtype is torch.float32
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        assert BertModel.from_pretrained(directory, dtype=dtype, device="cpu").dtype is torch.bfloat16
    assert BertModel.from_pretrained(directory, torch_dtype=torch.float64).dtype is torch.float64
    for dtype in ("int8", "nonsense", torch.int64):
        with pytest.raises(ValueError, match=r"dtype: expected a floating-point torch\.dtype"):
            BertModel.from_pretrained(directory, dtype=dtype)
    half = make_hf("BertModel").half()
    half.save_pretrained(tmp_path / "half")
    assert same_values(BertModel.from_pretrained(tmp_path / "half"), half)
    config_path = tmp_path / "half" / "config.json"
    values = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**values, "dtype": "float32"}))  # the configuration wins over the file
    transformers = pytest.importorskip("transformers")
    for cls in (BertModel, transformers.BertModel):
        assert cls.from_pretrained(tmp_path / "half", dtype="auto").dtype is torch.float32
    del values["dtype"]
    config_path.write_text(json.dumps(values))
    for dtype in (None, "auto"):
        assert BertModel.from_pretrained(tmp_path / "half", dtype=dtype).dtype is torch.float16


def test_dtypes_and_devices_that_no_model_has(make_hf: Make, tmp_path: Path) -> None:
    """All of it is said before anything is built."""
    make_hf("BertModel").save_pretrained(tmp_path)
    for device in ("nonsense", 1.5, "cpu:x"):
        with pytest.raises(ValueError, match=r"device: expected a torch\.device or its name, got"):
            BertModel.from_pretrained(tmp_path / "absent", device=device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype: expected a floating-point torch\.dtype"):
        BertModel.from_pretrained(tmp_path, dtype=torch.float8_e4m3fn)
    config_path = tmp_path / "config.json"
    values = json.loads(config_path.read_text())
    for dtype in ("int8", "complex64", "float8_e4m3fn", "bool"):
        config_path.write_text(json.dumps({**values, "dtype": dtype}))
        with pytest.raises(CheckpointError, match=rf"config\.json: dtype: expected a floating-point .* got .*{dtype}"):
            BertModel.from_pretrained(tmp_path)


def test_fields_that_no_model_goes_with(make_hf: Make, tmp_path: Path) -> None:
    make_hf("BertModel").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: config\.is_decoder: expected True where add_cross_attention"):
        BertModel.from_pretrained(tmp_path, add_cross_attention=True)


def test_stored_numbers_of_one_byte_become_fp32(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf("BertModel")
    BertConfig.from_hf(source.config).save_pretrained(tmp_path)
    state = {name: value.to(torch.float8_e4m3fn) for name, value in source.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = BertModel.from_pretrained(tmp_path)
    assert model.dtype is torch.float32
    assert torch.equal(model.pooler.dense.weight, state["pooler.dense.weight"].float())


def test_bad_directories(make_hf: Make, tmp_path: Path) -> None:
    for path in ("./bert-base-uncased", "a/b/c", tmp_path / "absent", "weights.bin", "a\0b", ""):
        with pytest.raises(CheckpointError, match=r"no such file or directory$"):
            BertModel.from_pretrained(path)
    with pytest.raises(CheckpointError, match=r"holds neither config\.json nor bert_config\.json"):
        BertModel.from_pretrained(tmp_path)
    make_hf("BertModel").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        BertModel.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors"):
        BertModel.from_pretrained(tmp_path)
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight: expected \[99, 16\], got \[31, 16\]"):
        BertModel.from_pretrained(tmp_path, vocab_size=99)


def test_google_file_names(make_hf: Make, tmp_path: Path) -> None:
    """The layout of 2018: bert_config.json, pytorch_model.bin with the prefix, gamma and beta."""
    source = make_hf("BertForPreTraining")
    source.save_pretrained(tmp_path)
    shutil.move(tmp_path / "config.json", tmp_path / "bert_config.json")
    (tmp_path / "model.safetensors").unlink()
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in source.state_dict().items()
    }
    torch.save(state | {"bert.embeddings.position_ids": torch.arange(12)[None]}, tmp_path / "pytorch_model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BertForPreTraining.from_pretrained(tmp_path)
    assert same_values(model, source)


def test_real_minilm(minilm_dir: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BertModel.from_pretrained(minilm_dir)
    theirs = transformers.BertModel.from_pretrained(minilm_dir)
    assert same_values(model, theirs)
    model.save_pretrained(tmp_path)
    assert same_values(transformers.AutoModel.from_pretrained(tmp_path), theirs)
