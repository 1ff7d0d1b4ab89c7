"""The reference model's own definitions: padding, dropout names, cache, masks, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bert_fast.reference.model import ReferenceBertModel
from bert_fast.testing.parity import randomize

CONFIG = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20,
    "max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3,
    "initializer_range": 0.02, "is_decoder": False, "add_cross_attention": False,
}  # fmt: skip
LENGTHS = torch.tensor([5, 2, 0, 4])
SEED = torch.tensor([424242], dtype=torch.int64)
EVERYTHING = {"output_attentions": True, "output_hidden_states": True}


def _model(**changes: object) -> ReferenceBertModel:
    model = ReferenceBertModel(SimpleNamespace(**{**CONFIG, **changes}))
    randomize(model)
    return model.double().eval()


def _batch(length: int = 6) -> tuple[Tensor, Tensor]:
    """ids and mask; the third sequence is padding alone."""
    ids = torch.randint(1, 31, (4, length), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(length) < LENGTHS[:, None]).long()


def test_padding_is_exactly_zero_and_a_sequence_of_padding_gives_no_nan() -> None:
    model = _model()
    ids, mask = _batch()
    output = model(ids, mask, **EVERYTHING)
    padding = mask == 0
    for state in (output.last_hidden_state, *output.hidden_states):
        assert not state[padding].any() and state[~padding].any(dim=1).all()
    for attention in output.attentions:
        assert not attention.transpose(1, 2)[padding].any() and not attention.permute(0, 3, 1, 2)[padding].any()
        torch.testing.assert_close(attention.sum(-1), mask[:, None].double().expand(-1, 3, -1))
    assert torch.equal(output.pooler_output[2], torch.tanh(model.pooler.dense.bias))
    (output.last_hidden_state.square().sum() + output.pooler_output.square().sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_batch_of_nothing() -> None:
    for shape in ((0, 5), (2, 0), (0, 0)):
        ids = torch.zeros(shape, dtype=torch.long)
        output = _model().train()(ids, torch.ones_like(ids), **EVERYTHING)
        assert output.last_hidden_state.shape == (*shape, 12) and output.pooler_output.shape == (shape[0], 12)


def test_what_stands_on_padding_does_not_matter() -> None:
    model = _model().train()
    ids, mask = _batch()
    other = ids.masked_fill(mask == 0, 7)
    outputs = [model(i, mask, dropout_seed=SEED).last_hidden_state for i in (ids, other)]
    assert torch.equal(*outputs)


def test_more_padding_draws_the_same_masks() -> None:
    model = _model().train()
    ids, mask = _batch()
    short = model(ids[:, :5], mask[:, :5], dropout_seed=SEED)
    padded = model(ids, mask, dropout_seed=SEED)
    torch.testing.assert_close(padded.last_hidden_state[:, :5], short.last_hidden_state)
    torch.testing.assert_close(padded.pooler_output, short.pooler_output)


def test_rows_and_columns_name_the_masks() -> None:
    """The same sentence in another row, or further right, is dropped differently; undropped it is the same."""
    model = _model()
    ids = torch.randint(1, 31, (1, 4)).repeat(2, 1)
    shifted = torch.cat([torch.zeros(2, 2, dtype=torch.long), ids], dim=1)
    mask, positions = (shifted > 0).long(), torch.tensor([0, 0, 0, 1, 2, 3])
    for training in (False, True):
        model.train(training)
        plain = model(ids, dropout_seed=SEED).last_hidden_state
        right = model(shifted, mask, position_ids=positions, dropout_seed=SEED).last_hidden_state[:, 2:]
        same = torch.allclose(plain[0], plain[1]), torch.allclose(plain, right)
        assert same == ((False, False) if training else (True, True))


def test_seed_is_one_draw_from_torch() -> None:
    model = _model().train()
    ids, mask = _batch()
    torch.manual_seed(3)
    first = model(ids, mask)
    assert first.seed.shape == (1,) and first.seed.dtype == torch.int64
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64), first.seed)
    assert torch.equal(torch.get_rng_state(), after)
    second, again = model(ids, mask), model(ids, mask, dropout_seed=first.seed)
    assert torch.equal(first.last_hidden_state, again.last_hidden_state)
    assert not torch.equal(first.last_hidden_state, second.last_hidden_state)
    model.eval()
    state = torch.get_rng_state()
    assert model(ids, mask, dropout_seed=SEED).seed is None and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["absolute", "relative_key", "relative_key_query"])
@pytest.mark.parametrize("training", [False, True])
def test_cached_steps_equal_one_run(kind: str, training: bool) -> None:
    """Positions, distances and dropout go on counting after the cache."""
    model = _model(is_decoder=True, position_embedding_type=kind).train(training)
    ids, _ = _batch()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding on the left
    whole = model(ids, mask, dropout_seed=SEED)
    past, steps = None, []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        out = model(ids[:, start:stop], mask[:, :stop], past_key_values=past, dropout_seed=SEED, use_cache=True)
        past = out.past_key_values
        steps.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole.last_hidden_state)
    for (k, v), (whole_k, whole_v) in zip(past, whole.past_key_values, strict=True):
        assert k.shape == (4, 3, 6, 4)
        torch.testing.assert_close(k, whole_k)
        torch.testing.assert_close(v, whole_v)


def test_cache_with_a_mask_per_pair() -> None:
    model = _model(is_decoder=True)
    ids, _ = _batch()
    sees = (torch.rand(4, 6, 6) < 0.5).tril() | torch.eye(6, dtype=torch.bool)
    whole = model(ids, sees).last_hidden_state
    first = model(ids[:, :4], sees[:, :4, :4])
    second = model(ids[:, 4:], sees[:, 4:], past_key_values=first.past_key_values)
    torch.testing.assert_close(second.last_hidden_state, whole[:, 4:])


def test_masks_of_all_ranks_agree() -> None:
    model = _model()
    ids, _ = _batch()
    sees = torch.rand(4, 6, 6) < 0.5
    sees[0, 2] = False  # a query that sees nothing
    added = torch.zeros(4, 1, 6, 6).masked_fill(~sees[:, None], torch.finfo(torch.float32).min)
    outputs = [model(ids, mask).last_hidden_state for mask in (sees.long(), sees[:, None], added)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert torch.isfinite(outputs[0]).all()


def test_a_decoder_adds_the_causal_mask_to_a_padding_mask() -> None:
    model = _model(is_decoder=True)
    ids, _ = _batch()
    mask = torch.ones_like(ids)
    outputs = [model(ids, m).last_hidden_state for m in (None, mask, torch.ones(4, 6, 6).tril())]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], model(ids, torch.ones(4, 6, 6)).last_hidden_state)


def test_head_mask_turns_heads_off() -> None:
    model = _model()
    ids, mask = _batch()
    head_mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    attentions = model(ids, mask, head_mask=head_mask, output_attentions=True).attentions
    assert not attentions[0][:, 1].any() and attentions[0][:, 0].any() and attentions[1][:, 1].any()


def test_activation_may_be_a_callable() -> None:
    ids, mask = _batch()
    named, called = _model(hidden_act="silu"), _model(hidden_act=torch.nn.SiLU())
    for model in (named, called):
        model(ids, mask).last_hidden_state.square().sum().backward()
    for ours, theirs in zip(named.parameters(), called.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_compact_tensors_and_views_are_all_the_same() -> None:
    """Strides, integer widths and broadcast position ids do not matter."""
    model = _model()
    ids, mask = _batch()
    types = (ids % 2).int()
    plain = model(ids, mask, types.long(), torch.arange(6).repeat(4, 1)).last_hidden_state
    strided = [t.T.contiguous().T for t in (ids.int(), mask.bool(), types)]
    for positions in (torch.arange(6), torch.arange(6)[None], torch.arange(6).int()):
        assert torch.equal(model(*strided, positions).last_hidden_state, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    ids, mask = _batch()
    truth = _model().train()(ids, mask, dropout_seed=SEED).last_hidden_state
    model = _model().to(dtype).train()
    output = model(ids, mask, dropout_seed=SEED).last_hidden_state
    output.float().square().sum().backward()
    assert output.dtype == dtype
    assert (output.double() - truth).abs().max() < 64 * torch.finfo(dtype).eps


def test_refusals() -> None:
    model = _model()
    ids, mask = _batch()
    with pytest.raises(ValueError, match="input_ids, inputs_embeds: expected exactly one of the two, got neither"):
        model()
    with pytest.raises(ValueError, match="expected exactly one of the two, got both"):
        model(ids, inputs_embeds=torch.zeros(4, 6, 12))
    with pytest.raises(ValueError, match=r"attention mask: .* got \[4, 5\]"):
        model(ids, mask[:, :5])
    with pytest.raises(ValueError, match="encoder_hidden_states: expected None"):
        model(ids, encoder_hidden_states=torch.zeros(4, 3, 12))
    with pytest.raises(ValueError, match="add_cross_attention: expected is_decoder=True"):
        _model(add_cross_attention=True)
    with pytest.raises(ValueError, match=r"hidden_size: expected a multiple of num_attention_heads \(5\), got 12"):
        _model(num_attention_heads=5)
    with pytest.raises(ValueError, match=r"position_embedding_type: expected one of .* got 'rotary'"):
        _model(position_embedding_type="rotary")
