"""Bad arguments of attention: every message names the argument, what was expected and what came."""

import dataclasses
from typing import Any

import pytest
import torch

from bert_fast import env, ops
from bert_fast.errors import BackendError
from bert_fast.ops import _attention_checks as checks
from tests.attention_records import plain_attention

CU = torch.tensor([0, 3, 5], dtype=torch.int32)
COORDS = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]], dtype=torch.int32)
X = torch.zeros(5, 4, 8)
TABLE = torch.zeros(5, 4, 8)
META = torch.device("meta")


def call(**changes: Any) -> torch.Tensor:
    return ops.attention(**dict(q=X, k=X, v=X, cu_seqlens_q=CU, max_seqlen_q=3, coords_q=COORDS) | changes)


DROPOUT = dict(dropout_p=0.1, seed=torch.tensor([1]))
OTHER_KEYS = dict(cu_seqlens_k=CU, max_seqlen_k=3)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    # q, k, v
    ({"q": torch.zeros(5, 24)}, ValueError, r"q: expected shape \[Tq, A, D\], got \[5, 24\]"),
    ({"q": [1]}, TypeError, "q: expected a Tensor, got list"),
    ({"q": X.int()}, TypeError, "q: expected a floating-point dtype, got int32"),
    (dict.fromkeys("qkv", X[..., :0]), ValueError, r"q: expected at least one head of .*, got shape \[5, 4, 0\]"),
    (dict.fromkeys("qkv", X[:, :0]), ValueError, r"q: expected at least one head of .*, got shape \[5, 0, 8\]"),
    ({"k": X[..., :4]}, ValueError, r"k: expected shape \[Tk, 4, 8\], got \[5, 4, 4\]"),
    ({"k": None}, TypeError, "k: expected a Tensor, got NoneType"),
    ({"v": X[..., :4]}, ValueError, r"v: expected shape \[5, 4, 8\], got \[5, 4, 4\]"),
    ({"v": X[:4]}, ValueError, r"v: expected shape \[5, 4, 8\], got \[4, 4, 8\]"),
    ({"v": X.half()}, TypeError, r"v: expected dtype float32 \(that of q\), got float16"),
    ({"k": X.to(META)}, ValueError, r"k: expected device cpu \(that of q\), got meta"),
    (
        {"k": X[:, :2], "v": X[:, :2]},
        ValueError,
        r"k: expected 4 heads \(those of q\), got 2: grouped-query attention is not supported; repeat the heads of k "
        "and v with repeat_interleave",
    ),
    ({"k": torch.zeros(5, 6, 8)}, ValueError, r"k: expected shape \[Tk, 4, 8\], got \[5, 6, 8\]"),
    # offsets and lengths
    ({"cu_seqlens_q": CU.long()}, TypeError, "cu_seqlens_q: expected dtype int32, got int64"),
    ({"cu_seqlens_q": [0, 3, 5]}, TypeError, "cu_seqlens_q: expected a Tensor, got list"),
    ({"cu_seqlens_q": CU[None]}, ValueError, r"cu_seqlens_q: expected shape \[B \+ 1\], got \[1, 3\]"),
    ({"cu_seqlens_q": CU[:0]}, ValueError, r"cu_seqlens_q: expected at least one entry \(the leading 0\), got none"),
    ({"cu_seqlens_q": CU.to(META)}, ValueError, r"cu_seqlens_q: expected device cpu \(that of q\), got meta"),
    ({"cu_seqlens_q": CU + 1}, ValueError, r"rise from 0 to the number of tokens \(5\), got \[1, 4, 6\]"),
    ({"cu_seqlens_q": CU - 1}, ValueError, r"cu_seqlens_q: .*rise from 0 .* got \[-1, 2, 4\]"),
    (
        {"cu_seqlens_q": torch.tensor([0, 6, 2, 5], dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_q: expected offsets that rise from 0 to the number of tokens \(5\), got \[0, 6, 2, 5\]",
    ),
    ({"max_seqlen_q": 2}, ValueError, r"max_seqlen_q: expected at least the longest sequence \(3\), got 2"),
    ({"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q: expected an int, got float"),
    ({"cu_seqlens_k": CU}, ValueError, "max_seqlen_k: expected an int beside cu_seqlens_k, got None"),
    (OTHER_KEYS | {"cu_seqlens_k": CU[:2]}, ValueError, r"cu_seqlens_k: expected shape \[3\], got \[2\]"),
    (
        OTHER_KEYS | {"max_seqlen_k": 1},
        ValueError,
        r"max_seqlen_k: expected at least the longest sequence \(3\), got 1",
    ),
    (OTHER_KEYS | {"k": X[:4], "v": X[:4]}, ValueError, r"cu_seqlens_k: .*number of tokens \(4\), got \[0, 3, 5\]"),
    # numbers
    ({"softmax_scale": "1"}, TypeError, "softmax_scale: expected a number, got str"),
    ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale: expected a number, got Tensor"),
    # dropout
    (DROPOUT | {"seed": None}, ValueError, "seed: expected a Tensor where dropout_p is 0.1, got None"),
    (DROPOUT | {"coords_q": None}, ValueError, "coords_q: expected a Tensor where dropout_p is 0.1, got None"),
    (DROPOUT | {"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
    (DROPOUT | {"seed": torch.tensor([1.0])}, TypeError, "seed: expected dtype int64, got float32"),
    (
        DROPOUT | {"max_seqlen_q": 65537},
        ValueError,
        "max_seqlen_k: expected at most 65536 keys a sequence where dropout_p is 0.1, got 65537",
    ),
    # names of tokens
    ({"causal": True, "coords_q": COORDS.long()}, TypeError, "coords_q: expected dtype int32, got int64"),
    ({"causal": True, "coords_k": COORDS[:4]}, ValueError, r"coords_k: expected shape \[5, 2\], got \[4, 2\]"),
    (
        OTHER_KEYS | {"causal": True},
        ValueError,
        r"coords_k: expected a Tensor \[T, 2\] where causal, bias or relative positions are given, got None",
    ),
    (
        {"causal": True, "coords_q": COORDS - 1},
        ValueError,
        "coords_q: expected rows and positions of at least 0, got -1",
    ),
    (
        {"causal": True, "coords_q": COORDS.flip(0)},
        ValueError,
        r"coords_q: expected one row and rising positions within a sequence, got \[1, 1\], \[1, 0\]",
    ),
    # bias
    ({"bias": torch.zeros(3, 3)}, ValueError, r"bias: expected shape \[B or 1, A or 1, .*\], got \[3, 3\]"),
    (
        {"bias": torch.zeros(2, 1, 3, 3, dtype=torch.bool)},
        TypeError,
        r"bias: expected a floating-point dtype \(0 where a query sees a key, -inf where not\), got bool",
    ),
    (
        {"bias": torch.ones(1, 2, 1, 1)},
        ValueError,
        r"bias: expected 1 or 4 heads in dimension 1, got \[1, 2, 1, 1\]",
    ),
    ({"bias": torch.zeros(1, 1, 3, 3, device=META)}, ValueError, r"bias: expected device cpu \(that of q\), got meta"),
    (
        {"bias": torch.zeros(2, 1, 3, 2)},
        ValueError,
        r"bias: expected at least \[2 or 1, A or 1, 3 or 1, 3 or 1\] for the rows and positions in coords, "
        r"got \[2, 1, 3, 2\]",
    ),
    ({"bias": torch.ones(2, 1, 2, 1)}, ValueError, r"bias: expected at least .*, got \[2, 1, 2, 1\]"),
    ({"bias": torch.zeros(2, 1, 1, 3), "coords_q": COORDS + 1}, ValueError, "bias: expected at least .3 or 1, A or 1"),
    # relative positions
    *(
        ({name: table}, error, message.format(name))
        for name in ("relative_keys", "relative_queries")
        for table, error, message in (
            (TABLE[..., :4], ValueError, r"{}: expected shape \[2M - 1, 4, 8\], got \[5, 4, 4\]"),
            (TABLE[:, :1], ValueError, r"{}: expected shape \[2M - 1, 4, 8\], got \[5, 1, 8\]"),
            (TABLE[:, 0], ValueError, r"{}: expected shape \[2M - 1, 4, 8\], got \[5, 8\]"),
            (TABLE[:4], ValueError, r"{}: expected an odd number of rows \(2M - 1\), got \[4, 4, 8\]"),
            (TABLE[:3], ValueError, r"{}: expected at least 5 rows for positions 2 apart, got \[3, 4, 8\]"),
            (TABLE.half(), TypeError, "{}: expected dtype float32, got float16"),
            (TABLE.to(META), ValueError, "{}: expected device cpu"),
            ([1], TypeError, "{}: expected a Tensor, got list"),
        )
    ),
    (
        {"relative_keys": TABLE, "relative_queries": TABLE.new_zeros(7, 4, 8)},
        ValueError,
        r"relative_queries: expected 5 rows \(those of relative_keys\), got \[7, 4, 8\]",
    ),
    # the order of work
    ({"sequence_order": CU}, ValueError, r"sequence_order: expected shape \[2\], got \[3\]"),
    ({"sequence_order": CU[:2].long()}, TypeError, "sequence_order: expected dtype int32, got int64"),
    ({"sequence_order": CU[:2].to(META)}, ValueError, "sequence_order: expected device cpu"),
    # back-ends
    ({"backend": "cuda"}, BackendError, "backend: expected one of triton, torch, reference, got 'cuda'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_the_good_call_is_good() -> None:
    """What the bad ones differ from by one argument."""
    call()
    call(**DROPOUT)
    call(**OTHER_KEYS)
    extras = dict(bias=torch.zeros(2, 4, 3, 3), relative_keys=TABLE, relative_queries=TABLE)
    call(**extras, causal=True, sequence_order=torch.tensor([0, 1], dtype=torch.int32))


def test_more_tokens_than_offsets_can_count() -> None:
    many = torch.zeros(1, 1, 1).expand(2**31, 1, 1)
    with pytest.raises(ValueError, match="q: expected at most 2147483647 tokens, got 2147483648"):
        ops.attention(many, many, many, cu_seqlens_q=CU, max_seqlen_q=3)


def test_values_are_checked_in_compiled_graphs_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="bias: expected at least"):
        compiled(bias=torch.zeros(1, 1, 3, 2))
    with pytest.raises(ValueError, match="cu_seqlens_q: expected offsets"):
        compiled(cu_seqlens_q=CU + 1)
    torch._dynamo.reset()


def test_on_a_device_values_are_looked_at_only_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking waits for the device; a tensor without values shows whether anyone looks."""
    offsets, coords = torch.zeros(3, dtype=torch.int32, device=META), torch.zeros(5, 2, dtype=torch.int32, device=META)
    bias, x = torch.zeros(1, 1, 1, 1, device=META), X.to(META)
    a = plain_attention(x, x, x, offsets, 3, coords_q=coords, coords_k=coords, bias=bias)
    checks.check_lookups(a)
    monkeypatch.setattr(checks, "SETTINGS", dataclasses.replace(env.SETTINGS, debug=True))
    with pytest.raises(RuntimeError, match="meta"):
        checks.check_lookups(a)


PADDED = torch.zeros(2, 3, 4, 8)
MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": X}, ValueError, r"q: expected shape \[B, Sq, A, D\], got \[5, 4, 8\]"),
        ({"k": PADDED[:1]}, ValueError, r"k: expected shape \[2, Sk, 4, 8\], got \[1, 3, 4, 8\]"),
        ({"k": PADDED[:, :, :2]}, ValueError, "k: expected 4 heads .* grouped-query attention is not supported"),
        ({"v": PADDED[:, :2]}, ValueError, r"v: expected shape \[2, 3, 4, 8\], got \[2, 2, 4, 8\]"),
        ({"keep_mask": MASK[0]}, ValueError, r"keep_mask: expected shape \[2, 3\], got \[3\]"),
        ({"keep_mask": MASK[:, None]}, ValueError, r"keep_mask: expected shape \[2, 3\], got \[2, 1, 3\]"),
        (
            {"keep_mask": MASK.float()},
            TypeError,
            r"keep_mask: expected dtype bool or an integer \(nonzero marks a token\), got float32; what is added to "
            "scores goes into bias",
        ),
        ({"keep_mask": MASK.to(META)}, ValueError, r"keep_mask: expected device cpu \(that of q\), got meta"),
        ({"keep_mask_k": MASK[:, :2]}, ValueError, r"keep_mask_k: expected shape \[2, 3\], got \[2, 2\]"),
        (
            {"keep_mask": MASK, "k": PADDED[:, :2], "v": PADDED[:, :2]},
            ValueError,
            r"keep_mask_k: expected a Tensor \[B, Sk\] beside keep_mask where Sk \(2\) is not Sq \(3\), got None",
        ),
        ({"bias": torch.zeros(3, 3)}, ValueError, r"bias: expected .* broadcastable to \[2, 4, 3, 3\], got \[3, 3\]"),
        (
            {"bias": torch.zeros(2, 4, 3, 4)},
            ValueError,
            r"bias: .* broadcastable to \[2, 4, 3, 3\], got \[2, 4, 3, 4\]",
        ),
        ({"bias": torch.zeros(3, 1, 1, 1)}, ValueError, r"bias: expected .*, got \[3, 1, 1, 1\]"),
        ({"first_position": -1}, ValueError, "first_position: expected at least 0, got -1"),
        ({"first_position": 1.0}, TypeError, "first_position: expected an int, got float"),
    ],
)
def test_bad_arguments_of_the_padded_call_are_named(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.attention_padded(**dict(q=PADDED, k=PADDED, v=PADDED) | changes)
