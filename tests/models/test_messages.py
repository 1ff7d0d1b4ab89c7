"""Bad arguments of ops and models: the message names the argument, what was expected and what came."""

from typing import Any

import pytest
import torch

import bert_fast
from bert_fast import ops

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, num_labels=3,
)  # fmt: skip
SEED = torch.tensor([77])


def _model(name: str = "BertModel", **changes: Any) -> Any:
    return getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **changes})).train()


def _call(name: str, **arguments: Any) -> Any:
    return lambda: _model(name)(**arguments)


X, W = torch.zeros(5, 32), torch.zeros(4, 32)
Q, CU = torch.zeros(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
INDEX = torch.arange(5, dtype=torch.int32)
COORDS = torch.stack((INDEX * 0, INDEX), 1)
ZEROS = torch.zeros(2, 3, dtype=torch.long)
MESSAGES = {
    "linear dtype": (lambda: ops.linear(X, W.half()), TypeError, r"weight: expected dtype float32 \(that of x\), got"),
    "linear integers": (lambda: ops.linear(X.long(), W.long()), TypeError, "x: expected a floating-point dtype, got"),
    "linear device": (
        lambda: ops.linear(X, W, torch.empty(4, device="meta")),
        ValueError,
        r"bias: expected device cpu \(that of x\), got meta",
    ),
    "gelu dtype": (lambda: ops.linear_gelu(X, W, W[:, 0].double()), TypeError, "bias: expected dtype float32"),
    "qkv dtype": (
        lambda: ops.qkv_projection(X, W, W[:, 0], W, W[:, 0], W.half(), W[:, 0]),
        TypeError,
        "wv: expected dtype float32",
    ),
    "attention end": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU * 1000, max_seqlen_q=5000),
        ValueError,
        r"cu_seqlens_q: expected offsets that rise from 0 to the number of tokens \(5\), got \[0, 2000, 5000\]",
    ),
    "attention keys": (
        lambda: ops.attention(Q, Q[:3], Q[:3], cu_seqlens_q=CU, max_seqlen_q=3),
        ValueError,
        "cu_seqlens_k: expected offsets",
    ),
    "attention bound": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=2),
        ValueError,
        r"max_seqlen_q: expected at least the longest sequence \(3\), got 2",
    ),
    "causal coords dtype": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=3, causal=True, coords_q=COORDS.long()),
        TypeError,
        "coords_q: expected dtype int32, got int64",
    ),
    "causal coords shape": (
        lambda: ops.attention(Q, Q, Q, cu_seqlens_q=CU, max_seqlen_q=3, causal=True, coords_q=COORDS[:2]),
        ValueError,
        r"coords_q: expected shape \[5, 2\], got \[2, 2\]",
    ),
    "dropout device": (
        lambda: ops.dropout(X, 0.1, seed=SEED.to("meta"), coords=COORDS, site=0),
        ValueError,
        "seed: expected device cpu",
    ),
    "dropout site": (
        lambda: ops.dropout(X, 0.1, seed=SEED, coords=COORDS, site=-1),
        ValueError,
        "site: expected a number in",
    ),
    "dropout p": (
        lambda: ops.dropout(X, "0.1", seed=SEED, coords=COORDS, site=0),
        TypeError,
        "dropout_p: expected a number, got str",
    ),
    "ids": (_call("BertModel", input_ids=[[1]]), TypeError, "input_ids: expected a Tensor, got list"),
    "mask": (
        _call("BertModel", input_ids=ZEROS, attention_mask=[[1]]),
        TypeError,
        "attention_mask: expected a Tensor, got list",
    ),
    "max_seqlen": (
        _call("BertModel", input_ids=ZEROS[0], cu_seqlens=CU, max_seqlen=3.0),
        TypeError,
        "max_seqlen: expected an int, got float",
    ),
    "huge max_seqlen": (
        _call("BertModel", input_ids=INDEX, cu_seqlens=CU, max_seqlen=10**9),
        ValueError,
        r"max_seqlen: expected at most 20 tokens a sequence \(max_position_embeddings\), got 1000000000",
    ),
    "embeddings width": (
        _call("BertModel", inputs_embeds=torch.zeros(1, 2, 31)),
        ValueError,
        r"inputs_embeds: expected a last dimension of 32 \(hidden_size\), got shape \[1, 2, 31\]",
    ),
    "embeddings dtype": (
        _call("BertModel", inputs_embeds=torch.zeros(1, 2, 32).double()),
        TypeError,
        r"inputs_embeds: expected dtype float32 \(that of the parameters\), got float64",
    ),
    "head mask": (
        _call("BertModel", input_ids=ZEROS, head_mask=torch.ones(7)),
        ValueError,
        r"head_mask: expected shape \[2\], \[2, 2\] or .*, got \[7\]",
    ),
    "decoder": (
        _call("BertModel", input_ids=ZEROS, encoder_hidden_states=X),
        ValueError,
        "encoder_hidden_states: expected None in an encoder .*, got Tensor",
    ),
    "positions": (
        _call("BertForMaskedLM", input_ids=ZEROS, masked_lm_positions=torch.tensor([6])),
        ValueError,
        r"masked_lm_positions: expected ids in \[0, 6\), got 6",
    ),
    "regression": (
        lambda: _model("BertForSequenceClassification", num_labels=1)(ZEROS, labels=torch.zeros(1)),
        ValueError,
        r"labels: expected shape \[2, 1\], got \[1\]",
    ),
    "labels": (
        _call("BertForSequenceClassification", input_ids=ZEROS, labels=[0, 1]),
        TypeError,
        "labels: expected a Tensor, got list",
    ),
    "configuration": (
        lambda: bert_fast.BertModel({"hidden_size": 32}),
        TypeError,
        r"config: expected a bert_fast.BertConfig, got builtins.dict",
    ),
    "checkpointing": (
        lambda: _model().activation_checkpointing_enable(offload=True),
        ValueError,
        "offload: expected False",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_arguments_are_named(case):
    call, error, message = MESSAGES[case]
    with pytest.raises(error, match=message):
        call()
