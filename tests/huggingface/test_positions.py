"""Positions that count from behind padding: padding within texts, vectors, packed input, texts that are too long."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, why_not
from bert_fast.models.positions import numbered_positions
from bert_fast.ops.packing import Packing

transformers = pytest.importorskip("transformers", minversion="5")

PADDING = 1
create = transformers.models.roberta.modeling_roberta.RobertaEmbeddings.create_position_ids_from_input_ids


def _ids(*size: int) -> Tensor:
    """A third of it padding, anywhere."""
    ids = torch.randint(2, 61, size)
    return ids.masked_fill(torch.rand(size) < 0.3, PADDING)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(4, 13), (1, 1), (3, 1), (0, 5), (2, 0)])
def test_padded_batches_count_as_transformers_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ids, keep = _ids(*shape).to(dtype), torch.rand(shape) < 0.7
    expected, packing = create(ids, PADDING), Packing.from_keep_mask(keep)
    assert torch.equal(numbered_positions(ids, PADDING, packing).long(), packing.pack(expected))
    assert torch.equal(numbered_positions(ids, PADDING, Packing.full(*shape, "cpu")).long(), expected.flatten())


@pytest.mark.parametrize("lengths", [[5, 1, 0, 9], [3], [0, 0], []])
def test_packed_sequences_count_each_from_its_own_start(lengths: list[int]) -> None:
    texts = [_ids(1, length) for length in lengths]
    ids = torch.cat(texts, dim=1)[0] if texts else torch.empty(0, dtype=torch.long)
    cu_seqlens = nn.functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0)).int()
    packing = Packing.from_cu_seqlens(cu_seqlens, max(lengths, default=0), len(ids), ids.device)
    expected = torch.cat([create(text, PADDING)[0] for text in texts]) if texts else ids
    assert torch.equal(numbered_positions(ids, PADDING, packing).long(), expected)
    columns = torch.cat([torch.arange(length) + 2 for length in lengths]) if texts else ids
    assert torch.equal(numbered_positions(None, PADDING, packing).long(), columns)


def test_vectors_are_all_counted_packed_or_not(make) -> None:
    model = fuse(make("RobertaModel"))
    vectors, keep = torch.randn(2, 7, 32), torch.arange(7) < torch.tensor([[7], [4]])
    padded = model(inputs_embeds=vectors, attention_mask=keep.long()).last_hidden_state
    packed = model(inputs_embeds=vectors[keep], cu_seqlens=torch.tensor([0, 7, 11]).int(), max_seqlen=7)
    assert torch.equal(packed.last_hidden_state, padded[keep])
    shifted = model(inputs_embeds=vectors, attention_mask=keep.long(), position_ids=torch.arange(3, 10))
    assert not torch.allclose(shifted.last_hidden_state[keep], padded[keep]), "positions count"


@pytest.mark.parametrize("name", ["RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"])
def test_a_text_that_is_too_long_is_named(make, name: str) -> None:
    """24 positions, of which two lie before the first."""
    model = fuse(make(name))
    message = (
        r"expected at most 22 tokens a sequence beside padding \(RobertaConfig has max_position_embeddings 24, "
        r"and positions begin at padding_idx \+ 1 = 2\), got 23"
    )
    ids = torch.full((2, 23), 5)
    with pytest.raises(ValueError, match=f"input_ids: {message}"):
        model(ids)
    with pytest.raises(ValueError, match=f"max_seqlen: {message}"):
        model(input_ids=ids[0], cu_seqlens=torch.tensor([0, 23]).int(), max_seqlen=23)
    with pytest.raises(ValueError, match=f"inputs_embeds: {message}"):
        model(inputs_embeds=torch.randn(2, 23, 32))
    assert model(ids[:, :22])[0].isfinite().all()
    ids[:, 4] = PADDING  # which takes no position
    assert why_not(model, input_ids=ids) == []
    assert model(ids)[0].isfinite().all()
    assert model(input_ids=ids[0], cu_seqlens=torch.tensor([0, 23]).int(), max_seqlen=23)[0].isfinite().all()


@pytest.mark.parametrize("name", ["RobertaForSequenceClassification", "MPNetForSequenceClassification",
                                  "RobertaForMultipleChoice", "MPNetForMultipleChoice"])  # fmt: skip
def test_heads_read_the_first_token_that_is_kept(make, name: str) -> None:
    """Padding on the left moves neither positions nor the token that the head reads."""
    model = fuse(make(name))
    text = torch.randint(2, 61, (2, 5))
    padded = torch.cat((torch.full((2, 3), PADDING), text), dim=1)
    if name.endswith("Choice"):
        text, padded = text[None], padded[None]
    torch.testing.assert_close(model(padded, attention_mask=(padded != PADDING).long())[0], model(text)[0])


def test_padding_within_a_text_is_what_its_id_says(make, batch) -> None:
    """Masked or not: transformers looks at ids alone, where positions are counted."""
    untouched, model = make("RobertaModel"), make("RobertaModel")
    batch["input_ids"][:, 2:4] = PADDING
    kept = batch["attention_mask"].bool()
    fuse(model)
    for mask in ({"attention_mask": batch["attention_mask"]}, {}):
        expected, got = (each(batch["input_ids"], **mask).last_hidden_state for each in (untouched, model))
        torch.testing.assert_close(got[kept] if mask else got, expected[kept] if mask else expected)
