"""qkv_projection: back-ends against the reference, neighbours or not, gradients and who wants them, registration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.storage import are_neighbours, join_memory
from bert_fast.testing.compare import assert_close_to_truth

NAMES = ("x", "wq", "bq", "wk", "bk", "wv", "bv")


def make(tokens: int, hidden: int, width: int, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None):
    """x, wq, bq, wk, bk, wv, bv as leaves; the upstream gradient."""
    shapes = [(tokens, hidden), *[(width, hidden), (width,)] * 3, (tokens, 3 * width)]
    dtypes = [dtype, *[parameter_dtype or dtype] * 6, dtype]
    tensors = [torch.randn(shape, dtype=torch.float64).to(to) for shape, to in zip(shapes, dtypes, strict=True)]
    return [nn.Parameter(t) for t in tensors[:7]], tensors[7]


def joined(inputs: list[Tensor]) -> list[Tensor]:
    join_memory(*inputs[1::2])
    join_memory(*inputs[2::2])
    return inputs


def run(inputs: list[Tensor], dqkv: Tensor, backend: str) -> dict[str, Tensor]:
    if backend == "plain":
        x, *parameters = inputs
        parts = [F.linear(x, *(p.to(x.dtype) for p in parameters[i : i + 2])) for i in (0, 2, 4)]
        qkv = torch.cat(parts, dim=1)
    else:
        qkv = ops.qkv_projection(*inputs, backend=backend)
    gradients = torch.autograd.grad(qkv, inputs, dqkv)
    return {"qkv": qkv.detach(), **{f"d{name}": t for name, t in zip(NAMES, gradients, strict=True)}}


def check(inputs: list[Tensor], dqkv: Tensor) -> dict[str, Tensor]:
    actual, plain = (run(inputs, dqkv, backend) for backend in ("torch", "plain"))
    truth = run([t.detach().double().requires_grad_() for t in inputs], dqkv.double(), "reference")
    for name in actual:
        assert_close_to_truth("qkv_projection", name, actual[name], plain[name], truth[name])
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 13, 24), (33, 48, 48), (50, 48, 16), (0, 8, 16)], ids=str)
@pytest.mark.parametrize("are_joined", [True, False])
def test_torch_backend_matches_the_reference(dtype: torch.dtype, shape: tuple[int, int, int], are_joined: bool) -> None:
    inputs, dqkv = make(*shape, dtype)
    if are_joined:
        joined(inputs)
        assert are_neighbours(*inputs[1::2]) == (shape != (1, 1, 1))
    check(inputs, dqkv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("are_joined", [True, False])
def test_fp32_parameters_get_fp32_gradients(dtype: torch.dtype, are_joined: bool) -> None:
    inputs, dqkv = make(37, 16, 24, dtype, torch.float32)
    actual = check(joined(inputs) if are_joined else inputs, dqkv)
    assert [actual[f"d{name}"].dtype for name in NAMES] == [dtype, *[torch.float32] * 6]


@pytest.mark.parametrize("tokens", [3, 40])
def test_where_weights_lie_changes_no_bit_of_their_gradients(tokens: int) -> None:
    inputs, dqkv = make(tokens, 16, 24, torch.float32)
    apart = run(inputs, dqkv, "torch")
    together = run(joined(inputs), dqkv, "torch")
    assert all(torch.equal(apart[f"d{name}"], together[f"d{name}"]) for name in NAMES[1:])


def test_autocast_saves_no_copy_and_casts_once() -> None:
    inputs, dqkv = make(5, 8, 8, torch.float32)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        qkv = ops.qkv_projection(*joined(inputs))
    gradients = torch.autograd.grad(qkv, inputs, dqkv.bfloat16())
    assert qkv.dtype == torch.bfloat16 and {g.dtype for g in gradients} == {torch.float32}
    of_parameters = [t for t in saved if t.dtype == torch.float32]
    assert {t.data_ptr() for t in of_parameters} == {p.data_ptr() for p in inputs[1::2]}


@pytest.mark.parametrize("layout", ["transposed", "every other column", "expanded"])
def test_layouts_of_input_and_gradient(layout: str) -> None:
    relaid = {
        "transposed": lambda t: t.t().contiguous().t(),
        "every other column": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
        "expanded": lambda t: t[:1].expand_as(t),
    }[layout]
    inputs, dqkv = make(7, 8, 8, torch.float32)
    x = relaid(inputs[0].detach()).requires_grad_()
    check([x, *joined(inputs)[1:]], relaid(dqkv))


def recorded(inputs: list[Any]) -> tuple[Tensor, Any]:
    """qkv, and the list that notes which gradients each backward asks a back-end for."""
    from bert_fast.torch import qkv_projection as aten

    asked: list[frozenset[str]] = []
    original = aten.qkv_projection_bwd

    def noted(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten, "qkv_projection_bwd", noted)
        qkv = ops.qkv_projection(*inputs)
        qkv.backward(torch.randn_like(qkv))
    return qkv, asked


@pytest.mark.parametrize(
    ("frozen", "asked"),
    [
        ((), ("x", "weight", "bias")),
        (("wq",), ("x", "weight", "bias")),
        (("wq", "wk", "wv"), ("x", "bias")),
        (("bq", "bk", "bv"), ("x", "weight")),
        (("x",), ("weight", "bias")),
        (("x", "wq", "wk", "wv", "bk", "bv"), ("bias",)),
    ],
    ids=str,
)
def test_only_wanted_gradients_are_made(frozen: tuple[str, ...], asked: tuple[str, ...]) -> None:
    inputs, _ = make(5, 8, 8, torch.float32)
    for name, t in zip(NAMES, inputs, strict=True):
        t.requires_grad_(name not in frozen)
    assert recorded(joined(inputs))[1] == [{*asked}]
    assert [name for name, t in zip(NAMES, inputs, strict=True) if t.grad is None] == [n for n in NAMES if n in frozen]


def test_without_biases() -> None:
    inputs, dqkv = make(5, 8, 8, torch.float32)
    x, *weights = inputs[0], *joined(inputs)[1::2]
    arguments = [a for w in weights for a in (w, None)]
    qkv = ops.qkv_projection(x, *arguments)
    torch.testing.assert_close(qkv, F.linear(x, torch.cat(weights)))
    gradients = torch.autograd.grad(qkv, [x, *weights], dqkv)
    expected = torch.autograd.grad(F.linear(x, torch.cat(weights)), [x, *weights], dqkv)
    torch.testing.assert_close(gradients, expected)


def test_gradients_are_taken_without_copies_and_are_neighbours() -> None:
    inputs, _ = make(5, 8, 8, torch.float32)
    for _ in range(2):  # the second time they are made anew
        recorded(joined(inputs))
        for parameters in (inputs[1::2], inputs[2::2]):
            first, *others = (p.grad for p in parameters)
            assert [g.data_ptr() - first.data_ptr() for g in others] == [first.nbytes, 2 * first.nbytes]
        for p in inputs:
            p.grad = None


def test_gradcheck_and_opcheck() -> None:
    inputs = joined(make(3, 4, 6, torch.float64)[0])
    assert torch.autograd.gradcheck(ops.qkv_projection, inputs)
    torch.library.opcheck(torch.ops.bert_fast.qkv_projection_fwd, (*inputs, "auto"))


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("x", torch.zeros(3, 4, 1), ValueError, r"x: expected shape \[T, K\]"),
        ("wk", torch.zeros(6, 5), ValueError, r"wk: expected shape \[6, 4\], got \[6, 5\]"),
        ("wv", torch.zeros(5, 4), ValueError, r"wv: expected shape \[6, 4\], got \[5, 4\]"),
        ("bv", torch.zeros(5), ValueError, r"bv: expected shape \[6\], got \[5\]"),
        ("bk", None, ValueError, "bk: expected a Tensor as bq is .all three biases or none., got None"),
        ("bq", None, ValueError, "bk: expected None as bq is .all three biases or none., got a Tensor"),
        ("wk", torch.zeros(6, 4).half(), TypeError, r"wk: expected dtype float32 \(that of x\), got float16"),
        ("bk", torch.zeros(6).half(), TypeError, r"bk: expected dtype float32 \(that of wk\), got float16"),
        ("wq", "w", TypeError, "wq: expected a Tensor, got str"),
    ],
)
def test_bad_input_is_named(name: str, wrong: Any, error: type[Exception], message: str) -> None:
    inputs: list[Any] = make(3, 4, 6, torch.float32)[0]
    inputs[NAMES.index(name)] = wrong
    with pytest.raises(error, match=message):
        ops.qkv_projection(*inputs)


def test_parameters_of_two_dtypes_are_refused() -> None:
    inputs, _ = make(3, 4, 6, torch.float16)
    inputs[3], inputs[4] = inputs[3].float(), inputs[4].float()
    with pytest.raises(TypeError, match=r"wk: expected dtype float16 \(that of wq\), got float32"):
        ops.qkv_projection(*inputs)
