"""The last layer computed for the rows that a head reads: the numbers of those rows of the whole, for less work."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bert_fast
from bert_fast.models.packed import Encoded
from bert_fast.modules.call import first_rows
from bert_fast.ops.packing import Packing
from bert_fast.testing.compare import assert_close_to_truth

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=20, initializer_range=0.3,
)  # fmt: skip
SEED = torch.tensor([7])
IDS = torch.randint(1, 50, (4, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 9, [0] * 3 + [1] * 6])  # one row is empty
MEMORY = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(2))
CHOICES = {
    "first tokens": first_rows,
    "some": lambda packing: torch.tensor([0, 3, 4, 9, 18]),
    "one": lambda packing: torch.tensor([11]),
    "all": lambda packing: torch.arange(19),
    "none of them": lambda packing: torch.zeros(0, dtype=torch.long),
}
FEATURES: dict[str, dict[str, Any]] = {
    "encoder": {},
    "relative": {"position_embedding_type": "relative_key_query"},
    "decoder": {"is_decoder": True, "add_cross_attention": True, "use_cache": False},
    "chunks": {"chunk_size_feed_forward": 2},
}


def make(**changes: Any) -> bert_fast.BertModel:
    torch.manual_seed(3)
    return bert_fast.BertModel(bert_fast.BertConfig(**{**SIZES, **changes})).train()


def results(model: bert_fast.BertModel, rows: Any, gather: Any, **arguments: Any) -> list[Tensor]:
    """Hidden states of the rows and all gradients; `gather`: rows taken here, from the whole."""
    model.zero_grad()
    if model.config.add_cross_attention:
        arguments["encoder_hidden_states"] = MEMORY.to(model.dtype)
    encoded = model.encode(input_ids=IDS, attention_mask=MASK, dropout_seed=SEED, rows=rows, **arguments)
    hidden = encoded.hidden if gather is None else encoded.hidden[gather(encoded.packing)]
    (hidden * torch.linspace(-1, 1, 32, dtype=hidden.dtype)).sin().sum().backward()
    return [hidden, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "feature"),
    [*((name, "encoder") for name in CHOICES), *(("some", feature) for feature in FEATURES if feature != "encoder")],
)
def test_rows_are_those_of_the_whole(name: str, feature: str):
    rows, config = CHOICES[name], FEATURES[feature]
    got, plain = results(make(**config), rows, None), results(make(**config), None, rows)
    truth = results(make(**config).double(), None, rows)
    for index, (mine, theirs, exact) in enumerate(zip(got, plain, truth, strict=True)):
        scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        kind = "gradient" if index else "output"
        assert_close_to_truth("fast_model", kind, mine / scale, theirs / scale, exact / scale)


@pytest.mark.parametrize("shown", [{"output_hidden_states": True}, {"output_attentions": True}])
def test_what_is_shown_of_the_last_layer_is_whole(shown: dict[str, bool]):
    model = make()
    encoded = model.encode(input_ids=IDS, attention_mask=MASK, dropout_seed=SEED, rows=first_rows, **shown)
    whole = model.encode(input_ids=IDS, attention_mask=MASK, dropout_seed=SEED, **shown)
    assert torch.equal(encoded.hidden, whole.hidden[encoded.rows])
    for name in ("hidden_states", "attentions"):
        pairs = zip(getattr(encoded, name) or (), getattr(whole, name) or (), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_model_without_layers_and_rows_that_are_not_asked_for():
    model = make(num_hidden_layers=0)
    whole = model.encode(input_ids=IDS, attention_mask=MASK, dropout_seed=SEED, rows=lambda packing: None)
    some = model.encode(input_ids=IDS, attention_mask=MASK, dropout_seed=SEED, rows=CHOICES["some"])
    assert whole.rows is None and torch.equal(some.hidden, whole.hidden[some.rows])


def test_checkpointing_does_not_change_them():
    model, both = make(), []
    for is_on in (False, True):
        if is_on:
            model.gradient_checkpointing_enable()
        both.append(results(model, first_rows, None))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("mask", [MASK, MASK * 0, torch.ones_like(MASK)])
def test_the_pooled_sequence_does_not_depend_on_rows(mask: Tensor):
    model = make().eval()

    def every_second_too(packing: Packing) -> Tensor:
        return torch.cat((first_rows(packing), torch.arange(0, len(packing.coords), 2))).unique()

    pooled = [
        model.pool(model.encode(input_ids=IDS, attention_mask=mask, rows=rows))
        for rows in (None, first_rows, every_second_too)
    ]
    torch.testing.assert_close(pooled[1], pooled[0])
    torch.testing.assert_close(pooled[2], pooled[0])


def test_first_rows_that_name_a_neighbour_do_no_harm():
    """On a GPU and in graphs an empty sequence keeps its place, and names another's token."""
    model = make().eval()
    packing = Packing.from_keep_mask(MASK)
    starts = packing.cu_seqlens[:-1].long().clamp(max=18)
    hidden = model.encode(input_ids=IDS, attention_mask=MASK, rows=lambda packing: starts).hidden
    pooled = model.pool(Encoded(hidden, packing, rows=starts))
    torch.testing.assert_close(pooled, model(IDS, MASK).pooler_output)


class Products(TorchDispatchMode):
    """Writes down how many tokens every op was given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bert_fast":
            self.tokens.append((func.__name__.split(".")[0], len(args[0])))
        return func(*args, **(kwargs or {}))


def test_the_last_layer_works_on_the_rows_alone():
    model = make(num_hidden_layers=2).eval()
    with Products() as products, torch.no_grad():
        model.encode(input_ids=IDS, attention_mask=MASK, rows=first_rows)
    closing = "dropout_add_layer_norm_fwd"
    assert products.tokens[-7:] == [
        ("linear_fwd", 3), ("linear_fwd", 19),  # query; key and value
        ("attention_fwd", 3), ("linear_fwd", 3), (closing, 3), ("mlp_fwd", 3), (closing, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_of_no_tokens_have_no_first_one(shape: tuple[int, int], masked: bool):
    ids = torch.zeros(shape, dtype=torch.long)
    packing = Packing.from_keep_mask(ids) if masked else Packing.full(*shape, ids.device)
    assert not len(first_rows(packing))
    torch.manual_seed(3)
    model = bert_fast.BertForSequenceClassification(bert_fast.BertConfig(**SIZES)).eval()
    assert model(ids, attention_mask=ids if masked else None).logits.shape == (shape[0], 2)
