"""BertModel and its heads: arguments, edge cases, bad input. Values are compared in tests/parity."""

import copy
import pickle

import pytest
import torch

import bert_fast
from bert_fast.errors import BackendError

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}


@pytest.fixture
def model() -> bert_fast.BertModel:
    return bert_fast.BertModel(bert_fast.BertConfig(**SIZES)).eval()


def _ids(*shape):
    return torch.randint(1, 50, shape)


def test_output_is_tuple_dictionary_and_object(model):
    out = model(_ids(2, 5))
    assert out[0] is out.last_hidden_state is out["last_hidden_state"]
    assert out.last_hidden_state.shape == (2, 5, 32)
    assert out.pooler_output.shape == (2, 32)
    assert isinstance(model(_ids(2, 5), return_dict=False), tuple)


def test_hidden_states_begin_with_embeddings_and_end_with_the_output(model):
    ids, mask = _ids(2, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    out = model(ids, mask, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert not out.hidden_states[0][0, 3:].any()


def test_padding_changes_no_kept_token(model):
    ids = _ids(1, 6)
    wide = torch.cat([ids, _ids(1, 7)], dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 7])
    torch.testing.assert_close(model(wide, mask).last_hidden_state[:, :6], model(ids).last_hidden_state)


def test_a_fully_masked_row_gives_zero_and_finite_gradients(model):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    model.train()
    out = model(_ids(2, 3), mask)
    assert not out.last_hidden_state[1].any()
    (out.last_hidden_state.square().sum() + out.pooler_output.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_everything_masked(model):
    out = model(_ids(2, 3), torch.zeros(2, 3))
    assert not out.last_hidden_state.any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batches(model, shape):
    assert model(torch.zeros(shape, dtype=torch.long)).last_hidden_state.shape == (*shape, 32)


def test_one_token_and_the_longest_sequence(model):
    assert model(_ids(1, 1)).last_hidden_state.shape == (1, 1, 32)
    assert model(_ids(1, 20)).last_hidden_state.shape == (1, 20, 32)


def test_packed_input_keeps_its_shape(model):
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    out = model(_ids(8), cu_seqlens=cu_seqlens, max_seqlen=5)
    assert out.last_hidden_state.shape == (8, 32)
    assert out.pooler_output.shape == (3, 32)


def test_manual_seed_decides_dropout(model):
    model.train()
    ids, outs = _ids(2, 7), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(ids).last_hidden_state)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_gradient_checkpointing_changes_nothing(model):
    model.train()
    ids, seed, gradients = _ids(3, 9), torch.tensor([11]), []
    for enable in (False, True):
        (model.gradient_checkpointing_enable if enable else model.gradient_checkpointing_disable)()
        model.zero_grad()
        model(ids, dropout_seed=seed).last_hidden_state.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_copies_pickles_and_half_precision(model):
    ids = _ids(2, 5)
    wanted = model(ids).last_hidden_state
    assert torch.equal(copy.deepcopy(model)(ids).last_hidden_state, wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).last_hidden_state, wanted)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)(ids).last_hidden_state
        assert half.dtype == dtype
        assert (half.float() - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_autocast_trains(model):
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(_ids(2, 5)).last_hidden_state.float().square().sum()
    loss.backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.dtype == torch.float32


def test_long_inference_in_chunks_equals_training_path(model):
    """Without gradients the MLP runs in chunks; the values must not show it."""
    ids = _ids(80, 17)
    with torch.no_grad():
        chunked = model(ids).last_hidden_state
    torch.testing.assert_close(chunked, model(ids).last_hidden_state)


def test_masked_lm_labelled_rows_alone_give_the_full_loss():
    model = bert_fast.BertForMaskedLM(bert_fast.BertConfig(**SIZES)).train()
    ids, mask = _ids(3, 8), torch.ones(3, 8)
    mask[1, 5:] = 0
    labels = torch.full((3, 8), -100)
    labels[0, 2], labels[1, 4], labels[2, 7] = 7, 8, 9
    seed = torch.tensor([1])
    short = model(ids, mask, labels=labels, dropout_seed=seed)
    full = model(ids, mask, labels=labels, dropout_seed=seed, output_logits=True)
    assert short.logits is None
    assert full.logits.shape == (3, 8, 50)
    torch.testing.assert_close(short.loss, full.loss)
    positions = (labels.flatten() != -100).nonzero().squeeze(1)
    call = dict(labels=labels.flatten()[positions], masked_lm_positions=positions, dropout_seed=seed)
    gathered, scored = model(ids, mask, **call), model(ids, mask, **call, output_logits=True)
    torch.testing.assert_close(gathered.loss, full.loss)
    torch.testing.assert_close(scored.loss, full.loss)
    assert gathered.logits is None
    assert scored.logits.shape == model.eval()(ids, mask, **call).logits.shape == (3, 50)


def test_all_labels_ignored_give_zero_loss_and_zero_gradients():
    model = bert_fast.BertForMaskedLM(bert_fast.BertConfig(**SIZES)).train()
    loss = model(_ids(2, 4), labels=torch.full((2, 4), -100)).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_decoder_shares_the_word_embeddings():
    model = bert_fast.BertForMaskedLM(bert_fast.BertConfig(**SIZES))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "cls.predictions.decoder.weight" in model.state_dict()


ERRORS = {
    "neither": (lambda m: m(), ValueError, "input_ids, inputs_embeds: expected exactly one of the two, got neither"),
    "both": (lambda m: m(_ids(1, 2), inputs_embeds=torch.zeros(1, 2, 32)), ValueError, "got both"),
    "rank": (lambda m: m(_ids(4)), ValueError, r"input_ids: expected a padded batch \[B, S\], got shape \[4\]"),
    "dtype": (lambda m: m(torch.zeros(1, 2)), TypeError, "input_ids: expected dtype int64 or int32, got float32"),
    "id": (lambda m: m(torch.tensor([[50]])), ValueError, r"input_ids: expected ids in \[0, 50\), got 50"),
    "negative id": (lambda m: m(torch.tensor([[-1]])), ValueError, r"input_ids: expected ids in \[0, 50\), got -1"),
    "too long": (lambda m: m(_ids(1, 21)), ValueError, "at most 20 tokens a sequence"),
    "mask shape": (lambda m: m(_ids(2, 3), torch.ones(2, 4)), ValueError, r"attention_mask: expected shape \[2, 3\]"),
    "mask rank": (lambda m: m(_ids(2, 3), torch.ones(3)), ValueError, "attention_mask: expected shape"),
    "types": (
        lambda m: m(_ids(1, 2), token_type_ids=torch.tensor([[0, 2]])),
        ValueError,
        r"token_type_ids: expected ids in \[0, 2\), got 2",
    ),
    "positions": (
        lambda m: m(_ids(1, 2), position_ids=torch.tensor([[0, 20]])),
        ValueError,
        r"position_ids: expected ids in \[0, 20\), got 20",
    ),
    "positions shape": (
        lambda m: m(_ids(2, 2), position_ids=torch.tensor([[0, 1, 2]])),
        ValueError,
        r"position_ids: expected shape \[2, 2\], got \[1, 3\]",
    ),
    "cu_seqlens and mask": (
        lambda m: m(_ids(3), torch.ones(3), cu_seqlens=torch.tensor([0, 3]).int(), max_seqlen=3),
        ValueError,
        "attention_mask: expected None beside cu_seqlens",
    ),
    "no max_seqlen": (
        lambda m: m(_ids(3), cu_seqlens=torch.tensor([0, 3]).int()),
        ValueError,
        "max_seqlen: expected an int beside cu_seqlens, got None",
    ),
    "padded beside cu_seqlens": (
        lambda m: m(_ids(1, 3), cu_seqlens=torch.tensor([0, 3]).int(), max_seqlen=3),
        ValueError,
        r"input_ids: expected packed tokens \[T\]",
    ),
    "packed cache": (
        lambda m: m(_ids(3), cu_seqlens=torch.tensor([0, 3]).int(), max_seqlen=3, past_key_values=()),
        ValueError,
        "past_key_values: expected None beside cu_seqlens",
    ),
    "seed": (
        lambda m: m.train()(_ids(1, 2), dropout_seed=torch.tensor([1.0])),
        TypeError,
        "dropout_seed: expected dtype int64, got float32",
    ),
    "backend": (
        lambda m: _with_backend(m, "triton"),
        BackendError,
        "back-end|implementation",
    ),
}


def _with_backend(model, name):
    with bert_fast.use_backend(name):
        return model(_ids(1, 2))


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_named(model, name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.long), ValueError, r"labels: expected shape \(?\[2, 3\]"),
        (torch.full((2, 3), 50), ValueError, r"labels: expected -100 or a class in \[0, 50\), got 50"),
        (torch.full((2, 3), -5), ValueError, r"labels: expected -100 or a class in \[0, 50\), got -5"),
        (torch.zeros(2, 3), TypeError, "labels: expected dtype int64 or int32, got float32"),
    ],
)
def test_bad_labels_are_named(labels, error, message):
    model = bert_fast.BertForMaskedLM(bert_fast.BertConfig(**SIZES))
    with pytest.raises(error, match=message):
        model(_ids(2, 3), labels=labels)


def test_cross_attention_is_for_decoders():
    with pytest.raises(ValueError, match=r"config\.is_decoder: expected True where add_cross_attention is set"):
        bert_fast.BertModel(bert_fast.BertConfig(**SIZES, add_cross_attention=True))
