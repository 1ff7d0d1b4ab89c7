"""What other people's tools write of a model and read back: whole, bit for bit, and no larger than a stock model's.

Query, key and value lie side by side in memory (`bert_fast/storage.py`). Tools that look for shared tensors go by their
storages; one storage for the three would make two of them copies of the first, to be left out of files.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from accelerate import Accelerator
from huggingface_hub import PyTorchModelHubMixin
from safetensors import safe_open
from torch import Tensor, nn

import bert_fast
from bert_fast.storage import are_neighbours

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
IDS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(3))


def stock() -> nn.Module:
    return filled(transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3)))


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


def patched() -> nn.Module:
    with bert_fast.patch_transformers():
        return stock()


def ours() -> nn.Module:
    return filled(bert_fast.BertForSequenceClassification(bert_fast.BertConfig(**SIZES, num_labels=3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ours": ours,
    "fused": lambda: bert_fast.fuse(stock()),
    "patched": patched,
    "unfused": lambda: bert_fast.unfuse(bert_fast.fuse(stock())),
}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MODELS[request.param]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def changed(model: nn.Module) -> nn.Module:
    """With weights that no other model of these tests has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def projections(model: nn.Module) -> list[list[Tensor]]:
    selves = [m for m in model.modules() if hasattr(m, "query") and hasattr(m, "value")]
    assert selves
    return [[getattr(getattr(one, name), kind) for name in ("query", "key", "value")] for one in selves
            for kind in ("weight", "bias")]  # fmt: skip


def assert_written(path: Path, model: nn.Module) -> None:
    """A safetensors file holds every entry of the model's state, bit for bit."""
    state = model.state_dict()
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(state)
        assert all(torch.equal(file.get_tensor(key), value) for key, value in state.items())


def assert_same(model: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), logits(other))


def test_storages_are_those_of_a_stock_model(make):
    model, expected = make(), stock().state_dict()
    assert list(model.state_dict()) == list(expected)
    places = set()
    for key, value in model.state_dict().items():
        storage = value.untyped_storage()
        assert storage.nbytes() == expected[key].untyped_storage().nbytes() == value.nbytes, key
        assert value.storage_offset() == 0 and storage.data_ptr() == value.data_ptr()
        places.add(storage.data_ptr())
    assert len(places) == len(expected)


@pytest.mark.parametrize("name", ["ours", "fused", "patched"])
def test_they_are_neighbours_all_the_same(name):
    assert all(are_neighbours(*three) for three in projections(MODELS[name]().train()))


def test_torch_save_of_one_entry_is_no_larger_than_of_a_stock_model(make):
    key = "bert.encoder.layer.1.attention.self.key.weight"
    sizes = []
    for model in (make(), stock()):
        buffer = io.BytesIO()
        torch.save(model.state_dict()[key], buffer)
        sizes.append(len(buffer.getvalue()))
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), model.state_dict()[key])
    assert sizes[0] == sizes[1]


def test_accelerate_save_model(make, tmp_path):
    model = changed(make())
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert_written(tmp_path / "model.safetensors", model)
    again = make()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert_same(again, model)


def test_accelerate_save_state_and_load_state(make, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(changed(make()))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = logits(model)
    accelerator.save_state(str(tmp_path))
    assert_written(tmp_path / "model.safetensors", model)
    changed(model)
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)


def test_safetensors_save_model_and_load_model(make, tmp_path):
    model, again = changed(make()), make()
    safetensors.torch.save_model(model, str(tmp_path / "a.safetensors"))
    assert_written(tmp_path / "a.safetensors", model)
    assert safetensors.torch.load_model(again, str(tmp_path / "a.safetensors")) == (set(), [])
    assert_same(again, model)


class Hub(nn.Module, PyTorchModelHubMixin):
    """A user's own module around a BERT, as people publish them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = MODELS[kind]()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize("kind", MODELS)
def test_hub_mixins(kind, tmp_path):
    model = changed(Hub(kind=kind)).eval()
    model.save_pretrained(tmp_path)
    assert_written(tmp_path / "model.safetensors", model)
    assert_same(Hub.from_pretrained(tmp_path).eval(), model)


def test_save_pretrained(make, tmp_path):
    model = changed(make())
    model.save_pretrained(tmp_path)
    assert_same(type(model).from_pretrained(tmp_path).eval(), model)
    assert_same(transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval(), unfused(model))


def unfused(model: nn.Module) -> nn.Module:
    """transformers' own model with the weights of `model`."""
    theirs = stock()
    theirs.load_state_dict(model.state_dict())
    return theirs


def test_trainer_saves_every_weight(make, tmp_path):
    model = make()
    data = [{"input_ids": row, "labels": torch.tensor(1)} for row in IDS]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2,
        disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert_written(tmp_path / "checkpoint-2" / "model.safetensors", model)


@pytest.mark.parametrize("library", [bert_fast, transformers], ids=["ours", "fused"])
def test_tied_words_are_written_once_and_come_back(library, tmp_path):
    def make() -> nn.Module:
        model = library.BertForMaskedLM(library.BertConfig(**SIZES)).eval()
        return bert_fast.fuse(model) if library is transformers else model

    model, again = changed(make()), make()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    for folder, one in (("model", model), ("theirs", theirs)):
        Accelerator(cpu=True).save_model(one, tmp_path / folder)
    files = [safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("model", "theirs")]
    assert files[0].keys() == files[1].keys()
    again.load_state_dict(files[0], strict=False)
    assert_same(again, model)


def test_an_optimizer_goes_on_after_unfusing():
    """Values move to other memory and back; parameters, and what an optimizer keeps of them, stay by identity."""
    moved, never = stock(), stock()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (moved, never)]
    for step in range(4):
        if step == 2:
            places = [p.data_ptr() for p in moved.parameters()]
            bert_fast.unfuse(bert_fast.fuse(moved))
            assert places != [p.data_ptr() for p in moved.parameters()]
        for model, optimizer in zip((moved, never), optimizers, strict=True):
            optimizer.zero_grad()
            model(input_ids=IDS).logits.square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(moved.parameters(), never.parameters(), strict=True))


def test_nothing_tells_an_unfused_model_from_a_stock_one():
    model, expected = bert_fast.unfuse(bert_fast.fuse(stock())), stock()
    for (name, mine), (_, other) in zip(model.named_modules(), expected.named_modules(), strict=True):
        assert type(mine) is type(other), name
        assert vars(mine).keys() == vars(other).keys(), name
        for key, value in vars(mine).items():
            if "hooks" in key:
                assert len(value) == len(vars(other)[key]), (name, key)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other) and vars(mine) == vars(other)
        assert mine.untyped_storage().resizable() and not vars(mine.untyped_storage())
    buffers = []
    for one in (model, expected):
        buffers.append(io.BytesIO())
        torch.save(one, buffers[-1])
    assert buffers[0].getvalue() == buffers[1].getvalue()
