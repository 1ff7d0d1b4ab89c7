"""A text's results within `batch_invariant`: the same bits alone and among others, in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast

pytestmark = pytest.mark.interpreter
pytest.importorskip("triton")

LENGTHS = (3, 70, 130)  # alone the first two are short sequences, together all are long ones, of several tiles


def make_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = bert_fast.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=130, initializer_range=0.3, num_labels=3,
    )  # fmt: skip
    return bert_fast.BertForSequenceClassification(config).eval().to(dtype)


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 50, (length,), generator=generator) for length in LENGTHS]


def results(model: Any, rows: list[Tensor], is_packed: bool) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and logits of each text."""
    lengths = torch.tensor([len(row) for row in rows])
    if is_packed:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths]).cumsum(0).int()
        batch = dict(input_ids=torch.cat(rows), cu_seqlens=ends, max_seqlen=int(lengths.max()))
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batch = dict(input_ids=ids, attention_mask=torch.arange(ids.shape[1]) < lengths[:, None])
    with torch.no_grad(), bert_fast.use_backend("triton"):
        states = model.bert(**batch).last_hidden_state
        logits = model(**batch).logits
    parts = states.split(lengths.tolist()) if is_packed else [one[:n] for one, n in zip(states, lengths, strict=True)]
    return [*zip(parts, logits, strict=True)]


def differing(model: Any, is_packed: bool) -> int:
    """How many texts differ in a bit between a batch of all, one of all in another order, and one of its own."""
    rows = texts()
    alone = [results(model, [row], is_packed)[0] for row in rows]
    together = results(model, rows, is_packed)
    turned = results(model, rows[::-1], is_packed)[::-1]
    return sum(
        not all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))
        for one, *others in zip(alone, together, turned, strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "is_packed"), [(torch.float16, True), (torch.float32, False)], ids=["float16-packed", "float32-padded"]
)
def test_same_bits_in_every_batch(dtype: torch.dtype, is_packed: bool) -> None:
    model = make_model(dtype)
    with bert_fast.batch_invariant():
        assert differing(model, is_packed) == 0


def test_without_it_bits_depend_on_the_longest_text() -> None:
    assert differing(make_model(torch.float16), is_packed=True) > 0
