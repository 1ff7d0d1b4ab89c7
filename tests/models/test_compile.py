"""Models and ops under torch.compile: one graph for all lengths, and outputs laid out as graphs are told."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bert_fast

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3,
)  # fmt: skip
SEED = torch.tensor([77])


def _model(name: str = "BertModel", **changes: Any) -> Any:
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
    "masked LM, packed": ("BertForMaskedLM", lambda lengths: _labelled(_packed(lengths))),
    "masked LM, padded": ("BertForMaskedLM", lambda lengths: _labelled(_padded(lengths))),
    "masked LM, all logits": ("BertForMaskedLM", lambda lengths: _labelled(_packed(lengths)) | {"output_logits": True}),
    "masked LM, positions": ("BertForMaskedLM", lambda lengths: _positions(_packed(lengths))),
}


@pytest.mark.parametrize("case", CALLS)
def test_one_graph_for_all_lengths(no_recompiles, case):
    name, make = CALLS[case]
    model = _model(name)
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
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected offsets that rise from 0 to the number of tokens"):
        compiled(**call)


def _op_calls(dtype: torch.dtype, *, transposed: bool) -> dict[str, tuple]:
    def new(*shape: int) -> Tensor:
        if transposed and len(shape) > 1:
            return torch.randn(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)
        return torch.randn(shape, dtype=dtype)

    index = torch.arange(5, dtype=torch.int32)
    coords, cu = torch.stack((index * 0, index), 1), torch.tensor([0, 2, 5], dtype=torch.int32)
    x, w, b, dy = new(5, 16), new(8, 16), new(8), new(5, 8)
    q, k, v = (new(5, 2, 16) for _ in range(3))
    layout = (cu, cu, 3, 3, 0.3, 0.2, SEED, coords, coords, 4, False)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    lse, mean = torch.zeros(2, 5, dtype=statistics), torch.ones(5, dtype=statistics)
    drop = (0.1, SEED, coords, 1)
    return {
        "linear_fwd": (x, w, b),
        "linear_bwd": (dy, x, w),
        "linear_gelu_fwd": (x, w, b, "none"),
        "linear_gelu_bwd": (dy, x, w, new(5, 8), "tanh"),
        "qkv_projection_fwd": (x, w, b, w, b, w, b),
        "qkv_projection_bwd": (dy, new(5, 8), new(5, 8), x, w, w, w),
        "dropout": (x, 0.5, SEED, coords, 2),
        "attention_fwd": (q, k, v, *layout),
        "attention_bwd": (new(5, 2, 16), q, k, v, torch.randn(5, 2, 16, dtype=dtype), lse, *layout),
        "dropout_add_layer_norm_fwd": (x, new(5, 16), None, new(16), new(16), 1e-12, *drop, "device"),
        "dropout_add_layer_norm_bwd": (x, new(5, 16), new(5, 16), mean, mean, new(16), new(16), *drop, "device"),
    }


@pytest.mark.parametrize("op", _op_calls(torch.float32, transposed=False))
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_outputs_are_laid_out_as_graphs_are_told(op, backend, dtype, transposed):
    """Compiled code trusts the fake implementations: a wrong stride there is silently wrong data."""
    arguments = (*_op_calls(dtype, transposed=transposed)[op], backend)
    torch.library.opcheck(
        getattr(torch.ops.bert_fast, op), arguments, test_utils=("test_schema", "test_autograd_registration",
        "test_faketensor"),
    )  # fmt: skip


def test_every_registered_op_is_checked():
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("bert_fast::")}  # fmt: skip
    assert registered == set(_op_calls(torch.float32, transposed=False))
