"""Other numbers of tokens or positions: what stays, what is new, what follows; as transformers does it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.models.resizing import resize_rows
from bert_fast.testing.memory import peak_bytes

Make = Callable[..., nn.Module]
SIZES = dict(
    vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
    max_position_embeddings=12,
)  # fmt: skip
WORD_MODELS = ["BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"]
IDS = torch.tensor([[2, 29, 7, 11]])
SHARE = 1e-9**0.5  # of the old rows' spread that new rows have


def make(name: str = "BertForMaskedLM", **config: Any) -> Any:
    config = {**SIZES, "is_decoder": name == "BertLMHeadModel", **config}
    model = getattr(bert_fast, name)(bert_fast.BertConfig(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def scores(model: Any) -> Tensor:
    output = model(IDS)
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", WORD_MODELS)
def test_old_tokens_keep_their_scores(name: str, tied: bool) -> None:
    model = make(name, tie_word_embeddings=tied)
    before, head, table = scores(model), model.get_output_embeddings(), model.get_input_embeddings()
    parameters = dict(model.named_parameters())
    for size in (37, 30):
        assert model.resize_token_embeddings(size) is table is model.get_input_embeddings()
        assert table.weight.shape == head.weight.shape == (size, 16) and head.bias.shape == (size,)
        assert model.config.vocab_size == table.num_embeddings == head.out_features == size
        assert (head.weight is table.weight) == tied and model.cls.predictions.bias is head.bias
        now = dict(model.named_parameters())
        assert now.keys() == parameters.keys() and all(now[key] is parameters[key] for key in now)
        after = scores(model)
        assert after.shape[-1] == size
        torch.testing.assert_close(after[..., :30], before)
    loss = model(torch.tensor([[29, 3]]), labels=torch.tensor([[29, 3]]), output_logits=True)
    assert "loss" in loss or name == "BertForPreTraining"


def test_without_words_to_predict() -> None:
    model = make("BertForTokenClassification")
    before = model(IDS).logits
    model.resize_token_embeddings(33)
    assert torch.equal(model(IDS).logits, before) and model(torch.tensor([[32]])).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"input_ids: expected ids in \[0, 33\)"):
        model(torch.tensor([[33]]))


def test_new_rows_stand_around_the_mean_or_at_the_start() -> None:
    model = make()
    weight, bias = (p.detach().clone() for p in model.get_output_embeddings().parameters())
    model.resize_token_embeddings(400)
    new = model.get_input_embeddings().weight[30:]
    share = (new - weight.mean(0)).std(0) / weight.std(0, correction=0) / SHARE
    assert ((share > 0.5) & (share < 2.0)).all()
    new_bias = model.get_output_embeddings().bias[30:]
    assert (new_bias - bias.mean()).abs().max() < 10 * SHARE * bias.std()
    model = make(initializer_range=0.5)
    model.resize_token_embeddings(3000, mean_resizing=False)
    assert 0.45 < model.get_input_embeddings().weight[30:].std() < 0.55
    assert not model.get_output_embeddings().bias[30:].any()


def test_covariance_of_new_rows() -> None:
    """Two columns that always move together do so in new rows too."""
    table = nn.Parameter(torch.randn(50, 1) @ torch.tensor([[1.0, -2.0]]) + 3.0)
    resize_rows([table], 90, None)
    centred = table[50:] - table[:50].mean(0)
    assert torch.corrcoef(centred.T)[0, 1] < -0.9


@pytest.mark.parametrize(("size", "multiple", "expected"), [(31, 8, 32), (None, 16, 32), (32, 8, 32), (None, None, 30)])
def test_multiples(size: int | None, multiple: int | None, expected: int) -> None:
    model = make()
    assert model.resize_token_embeddings(size, pad_to_multiple_of=multiple).num_embeddings == expected
    assert model.config.vocab_size == expected


def test_wrong_sizes() -> None:
    model = make()
    for arguments, error, message in (
        ((0,), ValueError, "new_num_tokens: expected at least 1, got 0"),
        ((3.0,), TypeError, "new_num_tokens: expected an int, got float"),
        ((31, 0), ValueError, "pad_to_multiple_of: expected at least 1, got 0"),
        ((31, 8.0), TypeError, "pad_to_multiple_of: expected an int, got float"),
    ):
        with pytest.raises(error, match=message):
            model.resize_token_embeddings(*arguments)
    assert model.config.vocab_size == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_frozen_and_padding_row(dtype: torch.dtype) -> None:
    model = make(pad_token_id=29).to(dtype)
    model.get_input_embeddings().weight.requires_grad_(False)
    table = model.resize_token_embeddings(40)
    assert table.weight.dtype is dtype and not table.weight.requires_grad and table.padding_idx == 29
    model.resize_token_embeddings(29)
    assert table.padding_idx is None
    model.config.validate()


@pytest.mark.parametrize("name", WORD_MODELS)
def test_saved_and_opened_by_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = make(name)
    model.resize_token_embeddings(35)
    model.save_pretrained(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(theirs(IDS)[0], scores(model))
    assert type(model).from_pretrained(tmp_path).config.vocab_size == 35


def test_set_embeddings_and_tie() -> None:
    model = make()
    table = nn.Embedding(33, 16, padding_idx=0)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table and model.get_output_embeddings().weight is not table.weight
    bias = model.get_output_embeddings().bias.detach().clone()
    model.tie_weights()
    head = model.get_output_embeddings()
    assert head.weight is table.weight and head.out_features == 33 and model.cls.predictions.bias is head.bias
    assert torch.equal(head.bias[:30], bias) and not head.bias[30:].any() and scores(model).shape == (1, 4, 33)
    head = nn.Linear(16, 33)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head and model.cls.predictions.bias is head.bias
    assert set(model.state_dict()) == set(make().state_dict())
    assert make("BertModel").get_output_embeddings() is None


def test_positions() -> None:
    model = make("BertModel")
    before = model(IDS).last_hidden_state
    for size in (40, 4):
        table = model.resize_position_embeddings(size)
        assert table is model.embeddings.position_embeddings and table.weight.shape == (size, 16)
        assert model.config.max_position_embeddings == table.num_embeddings == size
        assert torch.equal(model(IDS).last_hidden_state, before)
        assert model(torch.ones(1, size, dtype=torch.long)).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match="expected at most 4 tokens a sequence"):
        model(torch.ones(1, 5, dtype=torch.long))
    model.config.position_embedding_type = "relative_key"
    with pytest.raises(ValueError, match="position_embedding_type 'absolute', got 'relative_key'"):
        model.resize_position_embeddings(8)


def test_sizes_that_nothing_has() -> None:
    model = make()
    with pytest.raises(ValueError, match="new_num_tokens: expected an int <= 2147483647, got 2147483648"):
        model.resize_token_embeddings(2**31 - 1, pad_to_multiple_of=2)
    with pytest.raises(ValueError, match="new_num_position_embeddings: expected at least 1, got 0"):
        model.resize_position_embeddings(0)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 30


def test_nothing_is_resized_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tie_word_embeddings=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    joined, calls = torch.cat, 0

    def join(tensors: Any, *arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:  # the second of the tables
            raise RuntimeError("not enough memory")
        return joined(tensors, *arguments)

    monkeypatch.setattr(torch, "cat", join)
    with pytest.raises(RuntimeError, match="not enough memory"):
        model.resize_token_embeddings(40)
    monkeypatch.undo()
    assert calls == 3 and model.config.vocab_size == 30
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_many_new_rows_take_little_memory() -> None:
    """New rows by the thousand: never a number for each pair of an old row and a new one."""
    table = nn.Parameter(torch.randn(3000, 2))
    peak = peak_bytes(lambda: resize_rows([table], 23_000, None))
    assert peak < 3000 * 20_000 and table.shape == (23_000, 2)
    assert (table[3000:] - table[:3000].mean(0)).abs().max() < 1e-3


def test_padding_counted_from_the_end() -> None:
    model = make(pad_token_id=-1)
    model.resize_token_embeddings(40)
    assert model.get_input_embeddings().padding_idx == model.config.pad_token_id == 29
    model = make(pad_token_id=-1)
    model.resize_token_embeddings(20)
    assert model.get_input_embeddings().padding_idx is None and model.config.pad_token_id is None
