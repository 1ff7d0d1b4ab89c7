"""Decoding step by step: caches of every kind, the memory, what does not fit. Values: test_features."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast.modules.cache import KeyValueCache
from bert_fast.storage import are_neighbours

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=20, initializer_range=0.3, is_decoder=True,
)  # fmt: skip
IDS = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 8, [0] * 2 + [1] * 6, [1] * 8])
MEMORY = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2))
MEMORY_MASK = torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] * 5])
KEPT = MASK.bool()


def make(**changes: Any) -> bert_fast.BertModel:
    torch.manual_seed(3)
    return bert_fast.BertModel(bert_fast.BertConfig(**{**SIZES, **changes})).eval()


def memory(model: bert_fast.BertModel) -> dict[str, Tensor]:
    if not model.config.add_cross_attention:
        return {}
    return {"encoder_hidden_states": MEMORY, "encoder_attention_mask": MEMORY_MASK}


def in_steps(model: bert_fast.BertModel, past: Any, columns: list[int], start: int = 0) -> tuple[list[Tensor], Any]:
    """Hidden states of each step, and the last cache."""
    states = []
    for count in columns:
        stop = start + count
        output = model(
            IDS[:, start:stop], MASK[:, :stop], past_key_values=past, use_cache=True, **memory(model)
        )  # fmt: skip
        states.append(output.last_hidden_state)
        past, start = output.past_key_values, stop
    return states, past


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("columns", [[8], [1] * 8, [5, 2, 1]])
def test_steps_of_any_length_give_the_whole(columns: list[int], has_memory: bool):
    model = make(add_cross_attention=has_memory)
    whole = model(IDS, MASK, use_cache=False, **memory(model))
    assert whole.past_key_values is None
    states, past = in_steps(model, None, columns)
    torch.testing.assert_close(torch.cat(states, 1), whole.last_hidden_state)
    assert isinstance(past, KeyValueCache) and len(past) == 2 and past.get_seq_length() == 8
    assert [tuple(t.shape) for t in past[1]] == [(3, 4, 8, 8)] * 2 + [(3, 4, 5, 8)] * 2 * has_memory
    assert not past[0][0][1, :, :2].any()  # padding


@pytest.mark.parametrize("has_memory", [False, True])
def test_a_cache_reads_as_tuples_and_tuples_as_a_cache(has_memory: bool):
    model = make(add_cross_attention=has_memory)
    (_, second), _ = in_steps(model, None, [5, 3])
    _, past = in_steps(model, None, [5])
    (again,), _ = in_steps(model, tuple(past), [3], 5)
    assert torch.equal(again, second) and past.get_seq_length() == 5  # tuples stay as they are
    for nothing in ((), (None, None)):  # the memory is projected again
        (again,), _ = in_steps(model, tuple((*layer[:2], *nothing) for layer in past), [3], 5)
        torch.testing.assert_close(again, second)
    with pytest.raises(IndexError, match=r"expected a layer in \[0, 2\), got 2"):
        past[2]


@pytest.mark.parametrize("has_memory", [False, True])
def test_caches_of_transformers_are_extended(has_memory: bool):
    transformers = pytest.importorskip("transformers", minversion="5")
    model = make(add_cross_attention=has_memory)
    wanted, _ = in_steps(model, None, [5, 3])
    past = transformers.DynamicCache()
    if has_memory:
        past = transformers.EncoderDecoderCache(past, transformers.DynamicCache())
    states, returned = in_steps(model, past, [5, 3])
    assert all(torch.equal(a, b) for a, b in zip(states, wanted, strict=True))
    assert returned is past and past.get_seq_length() == 8
    if has_memory:
        assert past.is_updated == {0: True, 1: True}
        assert past.cross_attention_cache.get_seq_length() == 5
    static = transformers.StaticCache(transformers.BertConfig(**SIZES), max_cache_len=12)  # wider than what it holds
    states, _ = in_steps(model, static, [5, 3])
    assert all(torch.equal(a, b) for a, b in zip(states, wanted, strict=True))


def test_the_memory_is_projected_once():
    model = make(add_cross_attention=True)
    layer, seen = model.encoder.layer[0].crossattention.self.key, []
    layer.register_forward_hook(lambda module, arguments, result: seen.append(result))
    in_steps(model, None, [5, 1, 2])
    assert len(seen) == 1


def test_key_and_value_of_the_memory_stay_neighbours():
    model = make(add_cross_attention=True)
    wanted = model(IDS, MASK, **memory(model)).last_hidden_state
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).double().float()]
    copies.append(make(add_cross_attention=True))
    copies[-1].load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    for one in copies:
        projections = one.encoder.layer[1].crossattention.self
        assert are_neighbours(projections.key.weight, projections.value.weight)
        assert are_neighbours(projections.key.bias, projections.value.bias)
        assert torch.equal(one(IDS, MASK, **memory(one)).last_hidden_state, wanted)


def test_beams_are_reordered():
    model, order = make(add_cross_attention=True), torch.tensor([2, 0, 0])
    _, past = in_steps(model, None, [5])
    before = list(past)
    past.reorder_cache(order)
    for layer, old in zip(past, before, strict=True):
        assert all(torch.equal(t, o[order]) for t, o in zip(layer, old, strict=True))


def test_gradients_flow_through_a_cache():
    model = make().double()
    results = []
    for columns in ([8], [5, 3]):
        model.zero_grad()
        states, _ = in_steps(model, None, columns)
        torch.cat(states, 1).sin().sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for whole, steps in zip(*results, strict=True):
        torch.testing.assert_close(steps, whole)


def test_an_encoder_takes_keys_that_come_before_its_tokens():
    """As prefix tuning gives them: every token sees the prefix, which has no tokens of its own."""
    model = make(is_decoder=False)
    prefix = tuple((torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)) for _ in range(2))
    mask = torch.cat([torch.ones(3, 2), MASK], dim=1)
    wanted = model(IDS, MASK).last_hidden_state
    output = model(IDS, mask, past_key_values=prefix, position_ids=torch.arange(8))
    assert output.past_key_values is None and output.last_hidden_state.shape == (3, 8, 32)
    assert not torch.allclose(output.last_hidden_state, wanted)
    hidden = torch.cat([torch.zeros(3, 2), MASK], dim=1)  # the prefix as padding
    padded = model(IDS, hidden, past_key_values=prefix, position_ids=torch.arange(8)).last_hidden_state
    torch.testing.assert_close(padded, wanted)


def test_whether_a_cache_is_kept():
    model = make()
    assert model(IDS).past_key_values is not None
    assert model(IDS, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(IDS).past_key_values is None
    assert model(IDS, use_cache=True).past_key_values is not None
    assert make(is_decoder=False)(IDS, use_cache=True).past_key_values is None
    packed = {"input_ids": IDS[0], "cu_seqlens": torch.tensor([0, 8], dtype=torch.int32), "max_seqlen": 8}
    assert make()(**packed).past_key_values is None


CU_SEQLENS = torch.tensor([0, 8], dtype=torch.int32)
PAIR = (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
WRONG = {
    "no cache": ({"past_key_values": 3}, TypeError, "past_key_values: expected a cache or a tuple .*, got int"),
    "no tensors": ({"past_key_values": ((1, 2),) * 2}, ValueError, r"two or four Tensors \[B, A, S, D\].*got \['int'"),
    "layers": ({"past_key_values": (PAIR,)}, ValueError, "expected 2 layers of 3 rows, got 1 layers of 3 rows"),
    "rows": (
        {"past_key_values": (tuple(t[:2] for t in PAIR),) * 2}, ValueError,
        "past_key_values: expected 2 layers of 3 rows, got 2 layers of 2 rows",
    ),
    "mask without the cached": (
        {"past_key_values": (PAIR,) * 2, "attention_mask": torch.ones(3, 8)}, ValueError,
        r"attention_mask: expected shape \[3, 10\], \[3, 8, 10\] or .*, got \[3, 8\]",
    ),
    "too long": (
        {"past_key_values": (tuple(t.repeat(1, 1, 7, 1) for t in PAIR),) * 2}, ValueError,
        "input_ids: expected at most 20 tokens a sequence .*, got 22",
    ),
    "packed": (
        {"input_ids": IDS[0], "cu_seqlens": CU_SEQLENS, "max_seqlen": 8, "use_cache": True}, ValueError,
        "use_cache: expected None or False beside cu_seqlens",
    ),
    "no memory wanted": (
        {"encoder_hidden_states": MEMORY}, ValueError,
        r"encoder_hidden_states: expected None in an encoder and in a decoder without cross-attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str):
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        make()(**({"input_ids": IDS} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoder_hidden_states": MEMORY[:2]}, r"encoder_hidden_states: expected shape \[3, Sm, 32\], got \[2,"),
        (
            {"encoder_hidden_states": MEMORY, "encoder_attention_mask": MASK},
            r"encoder_attention_mask: expected shape \[3, 5\], \[3, 8, 5\] or .*, got \[3, 8\]",
        ),
    ],
)  # fmt: skip
def test_a_memory_that_does_not_fit_is_named(arguments: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        make(add_cross_attention=True)(IDS, **arguments)
