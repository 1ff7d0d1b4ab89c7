"""What a checkpoint lacks has initial values, and what it holds is not drawn first."""

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, BertPreTrainedModel
from bert_fast.models import initial_values
from bert_fast.models.checkpoint import load_checkpoint

CONFIG = BertConfig(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=32, initializer_range=0.05,
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.* initial values")


def without(model: nn.Module, folder: Path, *parts: str) -> Path:
    """A checkpoint of the model that lacks parameters whose names hold one of `parts`."""
    model.save_pretrained(folder)
    kept = {key: value for key, value in load_checkpoint(folder).items() if not any(part in key for part in parts)}
    (folder / "model.safetensors").unlink()
    torch.save(kept, folder / "pytorch_model.bin")
    return folder


def assert_drawn(weight: Tensor) -> None:
    values = weight.detach().float()
    assert values.isfinite().all() and 0.045 < float(values.std()) < 0.055 and abs(float(values.mean())) < 0.01


class Draws(TorchDispatchMode):
    """Sizes of the tensors that operators fill with random numbers, whoever calls them and by which name."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForSequenceClassification])
def test_what_is_loaded_is_not_drawn(cls: Any, tmp_path: Path) -> None:
    model = cls(CONFIG)
    model.save_pretrained(tmp_path)
    with Draws() as draws:
        loaded = cls.from_pretrained(tmp_path)
    assert sum(draws.sizes) <= 300, "no more than the head that tells classes, by PyTorch and by us"
    assert bool(draws.sizes) == (cls is BertForSequenceClassification)
    with Draws() as draws:
        cls(CONFIG)
    assert sum(draws.sizes) > 10_000, "the test would not see them"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_nothing_is_drawn_by_functions_in_the_place_of_pytorchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers has them while it loads a model, perhaps in another thread."""
    BertModel(CONFIG).save_pretrained(tmp_path)
    for name in ("kaiming_uniform_", "uniform_", "normal_"):
        original = getattr(nn.init, name)

        @functools.wraps(original)
        def another(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        monkeypatch.setattr(nn.init, name, another)
    with Draws() as draws:
        BertModel.from_pretrained(tmp_path)
    assert draws.sizes == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_missing_has_initial_values(dtype: torch.dtype, tmp_path: Path) -> None:
    lacking = "encoder.layer.1", "pooler", "word_embeddings", "embeddings.LayerNorm.bias", "layer.0.output.dense.weight"
    folder = without(BertModel(CONFIG), tmp_path, *lacking)
    loaded = []
    for _ in range(2):
        torch.manual_seed(5)
        loaded.append(BertModel.from_pretrained(folder, dtype=dtype))
    model, again = loaded
    stored = load_checkpoint(folder)
    for name, value in model.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, again.state_dict()[name])
        if name in stored:
            assert torch.equal(value, stored[name].to(dtype)), name
        elif name.endswith("LayerNorm.weight"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        elif name.endswith("word_embeddings.weight"):
            assert (value[CONFIG.pad_token_id] == 0).all()
            assert_drawn(value[CONFIG.pad_token_id + 1 :])
        else:
            assert_drawn(value)
    assert not any(initial_values.is_undrawn(module) for module in model.modules())


def test_parameters_of_another_shape_and_tied_ones(tmp_path: Path) -> None:
    BertForMaskedLM(CONFIG).save_pretrained(tmp_path)
    model = BertForMaskedLM.from_pretrained(tmp_path, vocab_size=150, ignore_mismatched_sizes=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_drawn(model.get_input_embeddings().weight[1:])


class HeadFirst(BertPreTrainedModel):
    """Its decoder, tied to the words, stands before the encoder, of which it has a copy and a part of its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bert = BertModel(config)
        self.other = copy.deepcopy(self.bert)
        self.memory = nn.LSTM(config.hidden_size, 8)
        self.decoder.weight = self.bert.embeddings.word_embeddings.weight


def test_classes_of_users(tmp_path: Path) -> None:
    folder = without(BertModel(CONFIG), tmp_path, "word_embeddings")
    model = HeadFirst.from_pretrained(folder)
    stored = load_checkpoint(folder)
    assert_drawn(model.decoder.weight[1:])
    assert_drawn(model.other.encoder.layer[0].intermediate.dense.weight)
    assert (model.other.encoder.layer[1].output.dense.bias == 0).all()
    limit = 8**-0.5  # of the LSTM's own
    assert all(0 < float(p.detach().abs().max()) <= limit for p in model.memory.parameters())
    query = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(model.bert.get_parameter(query), stored[query])


def test_models_that_are_made_meanwhile_are_drawn() -> None:
    made: list[BertModel] = []
    with initial_values.weights_follow():
        thread = threading.Thread(target=lambda: made.append(BertModel(CONFIG)))
        thread.start()
        thread.join()
    made.append(BertModel(CONFIG))
    for model in made:
        assert_drawn(model.encoder.layer[0].intermediate.dense.weight)


def test_a_load_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = without(BertModel(CONFIG), tmp_path)
    with pytest.raises(Exception, match=r"hidden_size|shape|fit"):
        BertModel.from_pretrained(folder, vocab_size=150)
    assert_drawn(BertModel(CONFIG).encoder.layer[0].intermediate.dense.weight)
