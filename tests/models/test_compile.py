"""Models under torch.compile: one graph for all lengths. Ops: `tests/ops/test_every_op.py`; the loss of masked words
in two layers, the last of which is not as the others: `tests/parity/test_dropout_runs.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3,
)  # fmt: skip
SEED = torch.tensor([77])


MEMORY, LABELS = torch.randn(2, 5, 32), torch.tensor([2, 0])


def _model(name: str = "BertModel", **changes: Any) -> Any:
    if name == "decoder":
        name, changes = "BertModel", {"is_decoder": True, "add_cross_attention": True} | changes
    return getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **changes})).train()


def _ids(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape)


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def _packed(lengths: list[int]) -> dict[str, Any]:
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"input_ids": _ids(total), "cu_seqlens": cu_seqlens, "max_seqlen": max(lengths), "dropout_seed": SEED}


def _padded(lengths: list[int]) -> dict[str, Any]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": _ids(*mask.shape), "attention_mask": mask, "dropout_seed": SEED}


def _labelled(call: dict[str, Any]) -> dict[str, Any]:
    ids = call["input_ids"]
    return call | {"labels": torch.where(ids % 2 == 0, ids, -100)}


def _positions(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"masked_lm_positions": torch.tensor([3, 0]), "labels": torch.tensor([4, 5])}


CALLS = {
    "encoder, packed": ("BertModel", _packed),
    "encoder, padded": ("BertModel", _padded),
    "decoder with memory, packed": ("decoder", lambda lengths: _packed(lengths) | {"encoder_hidden_states": MEMORY}),
    "classifier, padded": ("BertForSequenceClassification", lambda lengths: _padded(lengths) | {"labels": LABELS}),
    "masked LM, all logits": ("BertForMaskedLM", lambda lengths: _labelled(_packed(lengths)) | {"output_logits": True}),
    "masked LM, positions": ("BertForMaskedLM", lambda lengths: _positions(_packed(lengths))),
}


@pytest.mark.parametrize("case", CALLS)
def test_one_graph_for_all_lengths(no_recompiles, case):
    name, make = CALLS[case]
    # Two layers where the last is as the others; a graph of one is made in half the time.
    model = _model(name, num_hidden_layers=2 if case == "encoder, packed" else 1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 3], [6, 9], [11, 2]):
        results = []
        call = make(lengths)
        for run in (model, compiled):
            model.zero_grad()
            output = run(**call)
            loss = output.loss if "labels" in call else output[0].sin().sum() + output.pooler_output.sum()
            loss.backward()
            results.append([output[0].detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_compiled_inference_takes_any_number_of_tokens(no_recompiles):
    """Eager inference works on chunks of tokens; the graph must not hold their number."""
    model = _model(max_position_embeddings=600).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for lengths in ([40, 30], [500, 600], [600, 600, 600]):
            call = _packed(lengths)
            torch.testing.assert_close(compiled(**call)[0], model(**call)[0])


def test_a_compiled_model_still_refuses_wrong_offsets():
    """The routines read addresses: offsets beyond the tokens must be named, not followed."""
    torch._dynamo.reset()
    compiled = torch.compile(_model().eval(), fullgraph=True, backend="aot_eager")
    call = _packed([4, 3])
    compiled(**call)
    call["cu_seqlens"] = torch.tensor([0, 4, 4000], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected offsets that rise from 0 to the number of tokens"):
        compiled(**call)
