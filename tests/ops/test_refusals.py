"""What is no number, no flag, no dense tensor or has no values: refused by the name of the argument."""

from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import ops
from bert_fast.errors import BackendError
from bert_fast.optim import AdamW

X, ONE, ZERO = torch.randn(3, 4), torch.ones(4), torch.zeros(4)
Q, OFFSETS = torch.randn(2, 1, 4), torch.tensor([0, 2], dtype=torch.int32)
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("eps", "error"),
    [
        ("1", TypeError), (True, TypeError), (None, TypeError), ([], TypeError), (b"abc", TypeError),
        (np.zeros(2), TypeError), (float("nan"), ValueError), (float("inf"), ValueError), (10**400, ValueError),
    ],
    ids=["string", "bool", "none", "list", "bytes", "array", "nan", "inf", "huge"],
)  # fmt: skip
def test_eps_is_a_finite_number(eps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^eps: expected a"):
        ops.layer_norm(X, ONE, ZERO, eps=eps)
    with pytest.raises(error, match=r"^eps: expected a"):
        ops.dropout_add_layer_norm(X, X, ONE, ZERO, eps=eps)


def test_numbers_of_numpy_will_do() -> None:
    expected = ops.layer_norm(X, ONE, ZERO, eps=0.5)
    assert torch.equal(ops.layer_norm(X, ONE, ZERO, eps=np.float32(0.5)), expected)


@pytest.mark.parametrize("flag", [torch.ones(3), None, 2], ids=["tensor", "none", "int"])
def test_flags_are_bools(flag: Any) -> None:
    with pytest.raises(TypeError, match=r"^causal: expected a bool"):
        ops.attention(Q, Q, Q, cu_seqlens_q=OFFSETS, max_seqlen_q=2, causal=flag)


@pytest.mark.parametrize(
    "name", [torch.ones(2, 2), np.zeros(3), [], 5, ""], ids=["tensor", "array", "list", "int", "empty"]
)
def test_back_ends_are_names(name: Any) -> None:
    with pytest.raises(BackendError, match=r"^backend: expected one of"):
        ops.layer_norm(X, ONE, ZERO, backend=name)


def test_approximations_are_names() -> None:
    with pytest.raises(ValueError, match=r"^approximate: expected"):
        ops.bias_gelu(X, approximate=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^approximate: expected"):
        ops.linear_gelu(X, torch.ones(2, 4), approximate={"none"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda sparse: ops.layer_norm(sparse(X), ONE, ZERO)),
        ("bias", lambda sparse: ops.layer_norm(X, ONE, sparse(ZERO))),
        ("residual", lambda sparse: ops.dropout_add_layer_norm(X, sparse(X), ONE, ZERO)),
        ("x", lambda sparse: ops.bias_activation(sparse(X))),
        ("x", lambda sparse: ops.linear(sparse(X), torch.ones(2, 4))),
        ("weight", lambda sparse: ops.linear(X, sparse(torch.ones(2, 4)))),
        ("labels", lambda sparse: ops.cross_entropy(X, sparse(LABELS))),
        ("v", lambda sparse: ops.attention(Q, Q, sparse(Q), cu_seqlens_q=OFFSETS, max_seqlen_q=2)),
    ],
    ids=["x", "bias", "residual", "activation", "linear", "weight", "labels", "values"],
)
def test_tensors_are_dense(name: str, call: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected a dense Tensor, got layout sparse_coo"):
        call(torch.Tensor.to_sparse)


def test_parameters_without_memory_are_zeros() -> None:
    weight = torch._efficientzerotensor(4)
    actual, expected = (ops.dropout_add_layer_norm(X, X, w, ONE) for w in (weight, torch.zeros(4)))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("scale", [1.0, 2000.0], ids=["output", "input"])  # what is kept for backward
def test_backward_notices_shorter_parameters(name: str, scale: float) -> None:
    parameters = {"weight": (ONE * scale).requires_grad_(), "bias": ZERO.clone().requires_grad_()}
    y = ops.dropout_add_layer_norm(X, X, **parameters)
    parameters[name].data = torch.ones(2)
    with pytest.raises(ValueError, match=f"^{name}: expected 4 elements in backward"):
        y.sum().backward()


def test_nothing_is_read_without_values() -> None:
    meta = {"device": "meta"}
    words, table = torch.zeros(3, dtype=torch.int64, **meta), torch.ones(2, 4, **meta)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.embedding(words, table, table, table[0], table[0]).shape == (3, 4)
    q, offsets = Q.to("meta"), OFFSETS.to("meta")
    with pytest.raises(ValueError, match=r"^q: expected a Tensor with values"):
        ops.attention_with_probabilities(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=2)
    with pytest.raises(ValueError, match=r"^keep_mask: expected a Tensor with values"):
        ops.attention_padded(q[None], q[None], q[None], keep_mask=torch.ones(1, 2, dtype=torch.bool, **meta))


def _lists(**changed: Any) -> dict[str, Any]:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    return {name: [torch.ones(2)] for name in names} | {"steps": [torch.zeros(())]} | changed


@pytest.mark.parametrize("value", [None, 5, object()], ids=["none", "int", "object"])
def test_lists_are_sequences(value: Any) -> None:
    for name in _lists():
        with pytest.raises(TypeError, match=f"^{name}: expected a sequence of Tensors"):
            ops.adamw_step(**_lists(**{name: value}), lr=1.0)
    with pytest.raises(TypeError, match=r"^grads: expected a sequence of Tensors"):
        ops.global_norm(value)


def test_steps_want_memory_with_values() -> None:
    with pytest.raises(ValueError, match=r"^grads\[0\]: expected memory"):
        ops.adamw_step(**_lists(grads=[torch._efficientzerotensor(2)]), lr=1.0)
    with pytest.raises(ValueError, match=r"^steps\[0\]: expected memory"):
        ops.lamb_step(**_lists(steps=[torch._neg_view(torch.zeros(()))]), lr=1.0)
    with pytest.raises(ValueError, match=r"^grads\[0\]: expected memory"):
        ops.global_norm([torch._neg_view(torch.ones(2))])
    with pytest.raises(ValueError, match=r"^found_inf: expected memory"):
        ops.adamw_step(**_lists(), lr=1.0, found_inf=torch._efficientzerotensor(()))
    with pytest.raises(ValueError, match=r"^eps: expected an int of at most 64 bits"):
        ops.adamw_step(**_lists(), lr=1.0, eps=2**64)
    ops.adamw_step(**{name: [t.to("meta") for t in tensors] for name, tensors in _lists().items()}, lr=1.0)


def test_empty_half_precision_parameters_are_stepped() -> None:
    p = torch.nn.Parameter(torch.ones(4, 0, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p])
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"param_groups": None}, {"param_groups": [5]}, {"param_groups": [{"params": 5}]},
        {"param_groups": [{"params": [[]]}]}, {"state": 5}, {"state": {0: 5}},
    ],
    ids=["no groups", "no group", "no keys", "no key", "no states", "no state"],
)  # fmt: skip
def test_checkpoints_have_their_structure(damage: dict[str, Any]) -> None:
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"^state_dict: expected '(param_groups|state)' as"):
        optimizer.load_state_dict(optimizer.state_dict() | damage)


def test_optimizers_want_parameters() -> None:
    with pytest.raises(TypeError, match=r"^params: expected a sequence"):
        AdamW(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^params: can't optimize a non-leaf"):
        AdamW([torch.ones(2, requires_grad=True) * 2])
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"^param_group: expected a dict with 'params'"):
        optimizer.add_param_group(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^master_weights: expected a bool"):
        AdamW([torch.nn.Parameter(torch.ones(2))], master_weights=[])  # type: ignore[arg-type]


class Hostile:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_what_cannot_be_shown_is_named() -> None:
    with pytest.raises(BackendError, match=r"^backend: expected one of .*, got Hostile"):
        ops.layer_norm(X, ONE, ZERO, backend=Hostile())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^approximate: expected one of none, tanh, got <Hostile"):
        ops.bias_gelu(X, approximate=Hostile())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda nested: ops.linear(nested, torch.ones(2, 4))),
        ("x", lambda nested: ops.layer_norm(nested, ONE, ZERO)),
        ("residual", lambda nested: ops.dropout_add_layer_norm(X, nested, ONE, ZERO)),
        ("labels", lambda nested: ops.cross_entropy(X, nested)),
        ("keep_mask", lambda nested: ops.unpad(torch.zeros(3, 4, 2), nested)),
    ],
    ids=["linear", "norm", "residual", "labels", "mask"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_dense(name: str, call: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected a dense Tensor, got a nested one"):
        call(torch.nested.nested_tensor([torch.zeros(4)] * 3))


def test_positions_without_memory() -> None:
    coords, q, offsets = torch._efficientzerotensor((1, 2), dtype=torch.int32), Q[:1], OFFSETS // 2
    bias = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^coords_q: expected a Tensor with memory"):
        ops.attention_with_probabilities(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=1, bias=bias, coords_q=coords)


@pytest.mark.parametrize("name", ["seed", "coords"])
def test_nested_names_of_a_mask(name: str) -> None:
    """They have no shape that could be asked for."""
    dtypes = {"seed": torch.int64, "coords": torch.int32}
    given = {"seed": torch.ones(1, dtype=torch.int64), "coords": torch.zeros(3, 2, dtype=torch.int32)}
    given[name] = torch.nested.nested_tensor([torch.zeros(2, dtype=dtypes[name])])
    with pytest.raises(TypeError, match=f"{name}: expected a dense Tensor, got a nested one"):
        ops.dropout(torch.ones(3, 4), 0.5, site=1, **given)
