"""The op rotary: every back-end, transformers' functions, in place and not, autograd, torch.compile, messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend, ops
from bert_fast.errors import BackendError
from bert_fast.ops import _sole_holder
from bert_fast.ops.rotary import rotary, rotary_tables
from bert_fast.testing.compare import assert_close_to_truth

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
SHAPES = {
    (7, 3, 2, 8): torch.float32, (1, 3, 12, 64): torch.float16, (5, 3, 3, 30): torch.float32,
    (3, 3, 1, 2): torch.float16, (2, 3, 5, 128): torch.float16, (0, 3, 2, 8): torch.float32,
    (9, 4, 30): torch.float16, (4, 1, 6): torch.float32,
}  # fmt: skip
T, A, D = 6, 2, 8


def tables(tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    return rotary_tables(inv_freq, torch.arange(tokens) * 7 % 512)


def plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As transformers writes it, in the dtype of x."""
    shape = (x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1] // 2)
    cos, sin = (t.to(x.dtype).view(shape) for t in (cos, sin))
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    x, rest = (x[:, :2], x[:, 2:]) if x.dim() == 4 else (x, x[:0])
    if interleaved:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return torch.cat((x * cos + other * sin, rest), 1 if rest.dim() == 4 else 0)


def in_place(x: Tensor, *given: Any, **options: Any) -> Tensor:
    """Of a fresh product."""
    return rotary(x + 0, *given, inplace=True, **options)


def in_place_of_rows(x: Tensor, *given: Any, **options: Any) -> Tensor:
    """Of a product of two dimensions, seen as heads: as layers make it."""
    return rotary((x.flatten(1) + 0).view(x.shape), *given, inplace=True, **options)


def in_place_of_padded_rows(x: Tensor, *given: Any, **options: Any) -> Tensor:
    """Of a part of every row."""
    rows = torch.nn.functional.pad(x.flatten(1), (0, 8)) + 0
    return rotary(rows[:, :-8].unflatten(1, x.shape[1:]), *given, inplace=True, **options)


WAYS = [rotary, in_place, in_place_of_rows, in_place_of_padded_rows]


def results(
    function: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dy: Tensor
) -> dict[str, Tensor]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf, cos, sin, interleaved)
    return {"y": y.detach(), "dqkv": torch.autograd.grad(y, leaf, dy)[0]}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_back_ends_agree_with_fp64(
    name: str, way: Callable[..., Tensor], interleaved: bool, shape: tuple[int, ...]
) -> None:
    dtype = SHAPES[shape]
    x, dy = torch.randn(2, *shape).to(dtype).unbind()
    cos, sin = tables(shape[0], shape[-1])
    truth = results(plain, x.double(), cos.double(), sin.double(), interleaved, dy.double())
    theirs = results(plain, x, cos, sin, interleaved, dy)
    ours = results(lambda *given: way(*given[:3], interleaved=given[3], backend=name), x, cos, sin, interleaved, dy)
    for key, actual in ours.items():
        assert actual.dtype == dtype
        assert_close_to_truth("rotary", key, actual, theirs[key], truth[key])
        if len(shape) == 4:
            assert torch.equal(actual[:, 2], {"y": x, "dqkv": dy}[key][:, 2]), "value is passed through"


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_gradcheck(name: str, way: Callable[..., Tensor]) -> None:
    cos, sin = tables(3, 6, torch.float64)
    qkv = torch.randn(3, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    for interleaved in (False, True):
        function = lambda x, pairs=interleaved: way(x, cos, sin, interleaved=pairs, backend=name)  # noqa: E731
        assert torch.autograd.gradcheck(function, (qkv,))


def test_transformers_functions_and_tables() -> None:
    """Of both pairings; tables to the bit."""
    nomic = pytest.importorskip("transformers.models.nomic_bert.modeling_nomic_bert")
    roformer = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    config = nomic.NomicBertConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=600)
    module = nomic.NomicBertRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 5, 599, 100_000, 2**24 + 1])
    theirs = module(torch.zeros(1), positions[None])
    ours = rotary_tables(module.inv_freq, positions, module.attention_scaling)
    for table, expected in zip(ours, theirs, strict=True):
        assert torch.equal(table, expected[0, :, :8]) and torch.equal(table, expected[0, :, 8:])

    qkv = torch.randn(6, 3, 2, 16)
    q, k, v = (t.transpose(0, 1)[None] for t in qkv.unbind(1))
    expected = torch.cat([*nomic.apply_rotary_pos_emb(q, k, *theirs), v])
    torch.testing.assert_close(rotary(qkv, *ours).permute(1, 2, 0, 3), expected)

    # [batch, heads, length, D / 2 sines and D / 2 cosines]
    sinusoidal = torch.cat((ours[1], ours[0]), -1)[None, None]
    expected = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoidal, q, k)
    actual = rotary(qkv, *ours, interleaved=True)[:, :2].permute(1, 2, 0, 3)
    torch.testing.assert_close(actual, torch.cat(expected))


def test_bf16_errs_less_than_transformers() -> None:
    """Which rounds the tables, two products and a sum."""
    qkv = torch.randn(200, 3, 2, 16).bfloat16()
    cos, sin = tables(200, 16)
    truth = plain(qkv.double(), cos.double(), sin.double(), False)
    made = rotary(qkv, cos, sin), plain(qkv, cos, sin, False)
    ours, theirs = ((y.double() - truth).square().mean().sqrt() for y in made)
    assert 1.4 * ours < theirs


def test_scaling_is_of_both_tables() -> None:
    inv_freq, positions = torch.tensor([1.0, 0.1]), torch.arange(5)
    one, two = rotary_tables(inv_freq, positions), rotary_tables(inv_freq, positions, 1.5)
    assert all(torch.equal(table * 1.5, scaled) for table, scaled in zip(one, two, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("records", [False, True])
def test_in_place_is_the_same_memory_and_not_in_place_is_new(name: str, records: bool) -> None:
    leaf = torch.randn(T, 3 * A * D, requires_grad=records)
    product, cos, sin = leaf * 1, *tables(T, D)
    qkv = product.view(T, 3, A, D)
    before = qkv.detach().clone()
    new = rotary(qkv, cos, sin, backend=name)
    assert torch.equal(qkv, before) and new.is_contiguous()
    assert new.untyped_storage().data_ptr() != product.untyped_storage().data_ptr()
    y = rotary(qkv, cos, sin, inplace=True, backend=name)
    assert y.data_ptr() == product.data_ptr() and torch.equal(y, new) and torch.equal(qkv, y)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_what_saved_qkv_before_notices_in_backward(name: str) -> None:
    cos, sin = tables(T, D)
    for records in (True, False):
        weight = torch.randn(T, 3 * A * D, requires_grad=True)
        product = (weight * 1) if records else torch.randn(T, 3 * A * D)
        saved = (product * weight).sum()
        rotary(product.view(T, 3, A, D), cos, sin, inplace=True, backend=name)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


@pytest.mark.parametrize("seen", [lambda t: t, lambda t: t.flatten(1).view(T, 3, A, D)], ids=["leaf", "view"])
def test_leaves_that_require_a_gradient_are_not_written_to(seen: Callable[[Tensor], Tensor]) -> None:
    leaf = torch.randn(T, 3, A, D, requires_grad=True)
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        rotary(seen(leaf), *tables(T, D), inplace=True)
    with torch.no_grad():
        rotary(leaf, *tables(T, D), inplace=True)
    assert torch.equal(leaf, rotary(before, *tables(T, D)))


def test_a_view_with_a_gradient_of_its_own_keeps_it() -> None:
    """A function of the caller's that returns a view: gradient reversal, say."""

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view(T, 3, A, D)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return -dy.reshape(T, -1)

    leaf = torch.randn(T, 3 * A * D, requires_grad=True)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        rotary(Reversed.apply(leaf * 1), *tables(T, D), inplace=True)


def test_what_is_done_with_qkv_afterwards_is_done_with_the_result() -> None:
    cos, sin = tables(T, D)
    leaf, dy = torch.randn(T, 3 * A * D, requires_grad=True), torch.randn(T, 3, A, D)
    qkv = (leaf * 1).view(T, 3, A, D)
    rotary(qkv, cos, sin, inplace=True)
    expected = torch.autograd.grad(rotary(leaf.view(T, 3, A, D), cos, sin), leaf, dy)
    assert torch.equal(torch.autograd.grad(qkv, leaf, dy)[0], expected[0])


class Made(torch.autograd.Function):
    """The identity, whose gradient is fresh memory that is noted."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor, addresses: list[int] | None = None) -> Tensor:
        ctx.dy, ctx.addresses = dy, [] if addresses is None else addresses
        return y.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        fresh = ctx.dy.clone()
        ctx.addresses.append(fresh.data_ptr())
        return fresh, None, None


@dataclass
class Turned:
    """A turned product of a leaf, an upstream gradient of it, and what it becomes."""

    leaf: Tensor
    y: Tensor
    dy: Tensor
    expected: Tensor


@pytest.fixture(params=WAYS[:3])
def turned(request: pytest.FixtureRequest) -> Turned:
    leaf, dy, (cos, sin) = torch.randn(T, 3, A, D, requires_grad=True), torch.randn(T, 3, A, D), tables(T, D)
    return Turned(leaf, request.param(leaf * 1, cos, sin), dy, rotary(dy, cos, -sin))


@pytest.mark.parametrize("way", [rotary, in_place, in_place_of_rows])
def test_a_gradient_that_nothing_else_holds_is_turned_where_it_lies(way: Callable[..., Tensor]) -> None:
    leaf, dy, addresses, found = torch.randn(T, 3, A, D, requires_grad=True), torch.randn(T, 3, A, D), [], []
    before = leaf * 1
    before.register_hook(lambda gradient: found.append(gradient.data_ptr()))
    y = way(before, *tables(T, D))
    Made.apply(y, dy, addresses).sum().backward()
    assert found == addresses
    cos, sin = tables(T, D)
    torch.testing.assert_close(leaf.grad, rotary(dy, cos, -sin))


def test_the_gradient_of_attention_is_turned_where_it_lies() -> None:
    leaf, found = torch.randn(T, 3, A, D, requires_grad=True), []
    product = leaf * 1
    product.register_hook(lambda gradient: found.append(gradient.data_ptr()))
    y = rotary(product, *tables(T, D), inplace=True)
    offsets = torch.tensor([0, 2, T], dtype=torch.int32)
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        module = backend.resolve("attention", backend.OpSpec.of(y))
        backward = module.attention_bwd
        patch.setattr(module, "attention_bwd", lambda *given: made.append(given[-1].data_ptr()) or backward(*given))
        ops.attention_qkv(y, cu_seqlens=offsets, max_seqlen=4).sum().backward()
    assert found == made and len(made) == 1


def held_by_hook(t: Turned) -> Tensor:
    kept: list[Tensor] = []
    t.y.register_hook(kept.append)
    Made.apply(t.y, t.dy).sum().backward()
    return kept[0]


def held_by_a_hook_of_the_function(t: Turned) -> Tensor:
    kept: list[Tensor] = []
    out = Made.apply(t.y, t.dy)
    out.grad_fn.register_hook(lambda inputs, outputs: kept.append(inputs[0]))
    out.sum().backward()
    return kept[0]


def held_by_a_prehook(t: Turned) -> Tensor:
    kept: list[Tensor] = []
    t.y.grad_fn.register_prehook(lambda outputs: kept.append(outputs[0]))
    Made.apply(t.y, t.dy).sum().backward()
    return kept[0]


def held_as_another_view(t: Turned) -> Tensor:
    kept: list[Tensor] = []
    t.y.register_hook(lambda gradient: kept.append(gradient.view(-1)))
    Made.apply(t.y, t.dy).sum().backward()
    return kept[0].view(t.dy.shape)


def asked_for(t: Turned) -> Tensor:
    return torch.autograd.grad(Made.apply(t.y, t.dy).sum(), [t.y, t.leaf])[0]


def retained(t: Turned) -> Tensor:
    t.y.retain_grad()
    Made.apply(t.y, t.dy).sum().backward()
    assert t.y.grad is not None
    return t.y.grad


def the_callers(t: Turned) -> Tensor:
    given = t.dy.clone()
    t.y.backward(given)
    return given


def shared_with_another(t: Turned) -> Tensor:
    """The gradient of a sum goes to both summands as one tensor; the other is asked for after this one is turned."""
    other = torch.zeros_like(t.dy, requires_grad=True)
    Made.apply(t.y + other, t.dy).sum().backward()
    assert other.grad is not None
    return other.grad


HOLDERS = [
    held_by_hook, held_by_a_hook_of_the_function, held_by_a_prehook, held_as_another_view, asked_for, retained,
    the_callers, shared_with_another,
]  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_something_else_holds_stays_as_it_is(
    holder: Callable[[Turned], Tensor], turned: Turned
) -> None:
    got: list[Tensor] = []
    turned.leaf.register_hook(got.append)
    held = holder(turned)
    assert torch.equal(held, turned.dy)
    torch.testing.assert_close(got[0], turned.expected)


def test_a_graph_that_is_kept_gives_the_same_gradient_again(turned: Turned) -> None:
    loss = Made.apply(turned.y, turned.dy).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, turned.leaf, retain_graph=True)
        torch.testing.assert_close(gradient, turned.expected)


def test_both_forms_of_a_sole_gradient_are_known() -> None:
    """As it is, and through a view: else backward makes new tensors for ever, and nothing says so."""
    assert len(_sole_holder._of_one()) == 2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["padded rows", "heads first", "columns apart", "expanded"])
def test_any_strides(name: str, layout: str, interleaved: bool) -> None:
    qkv = torch.randn(T, 3, A, D)
    laid = {
        "padded rows": lambda: torch.nn.functional.pad(qkv.flatten(1), (0, 5))[:, : 3 * A * D].unflatten(1, (3, A, D)),
        "heads first": lambda: qkv.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
        "columns apart": lambda: torch.stack((qkv, qkv), -1)[..., 0],
        "expanded": lambda: qkv[:1].expand(T, 3, A, D),
    }[layout]()
    cos, sin = (torch.stack((t, t), -1)[..., 0] for t in tables(T, D))
    expected = rotary(laid.contiguous(), cos.contiguous(), sin.contiguous(), interleaved=interleaved, backend=name)
    y = rotary(laid, cos, sin, interleaved=interleaved, backend=name)
    assert torch.equal(y, expected) and y.is_contiguous()
    dy = torch.randn(T, 3, A, D)
    leaf = laid.detach().requires_grad_()
    upstream = dy.transpose(0, 3).contiguous().transpose(0, 3)
    (gradient,) = torch.autograd.grad(rotary(leaf, cos, sin, interleaved=interleaved, backend=name), leaf, upstream)
    assert torch.equal(gradient, rotary(dy, cos, -sin, interleaved=interleaved, backend=name))
    if layout != "expanded":
        assert torch.equal(rotary(laid, cos, sin, interleaved=interleaved, inplace=True, backend=name), expected)
        assert torch.equal(laid, expected)


def test_elements_in_one_place_are_not_written_over() -> None:
    with pytest.raises(ValueError, match=r"qkv: expected one place per element \(inplace\), got strides"):
        rotary(torch.randn(1, 3, A, D).expand(T, 3, A, D), *tables(T, D), inplace=True)


def test_saves_the_tables_alone() -> None:
    cos, sin = tables(T, D)
    kept: list[Tensor] = []
    leaf = torch.randn(T, 3, A, D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for way in WAYS[:3]:
            y = way(leaf * 2.0, cos, sin)
            assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}
    y.sum().backward()


def test_part_of_the_inputs_wants_gradients() -> None:
    """A constant qkv between others that want gradients records nothing."""
    assert not rotary(torch.randn(T, 3, A, D), *tables(T, D)).requires_grad
    leaf = torch.randn(T, 3, A, D, requires_grad=True)
    with torch.no_grad():
        assert not rotary(leaf, *tables(T, D)).requires_grad
    with torch.inference_mode():
        assert rotary(torch.randn(T, 3, A, D), *tables(T, D), inplace=True).is_inference()


def test_autocast_leaves_the_dtype_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            leaf = torch.randn(T, 3, A, D).to(dtype).requires_grad_()
            y = rotary(leaf * 1, *tables(T, D), inplace=True)
            y.float().sum().backward()
            assert y.dtype == leaf.grad.dtype == dtype


@pytest.mark.parametrize("inplace", [False, True])
def test_one_full_graph_gives_the_eager_result(inplace: bool) -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary((x * 1).view(len(x), 3, A, D), cos, sin, inplace=inplace) * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        leaf, (cos, sin) = torch.randn(tokens, 3 * A * D, requires_grad=True), tables(tokens, D)
        made = [f(leaf, cos, sin) for f in (function, compiled)]
        gradients = [torch.autograd.grad(y, leaf, torch.ones_like(y))[0] for y in made]
        assert torch.equal(*made) and torch.equal(*gradients)


def test_second_derivatives_are_refused() -> None:
    leaf = torch.randn(T, 3, A, D, requires_grad=True)
    (gradient,) = torch.autograd.grad(rotary(leaf, *tables(T, D)).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        gradient.sum().backward()


QKV, TABLE = torch.zeros(T, 3, A, D), torch.zeros(T, D // 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"qkv": [1.0]}, TypeError, "qkv: expected a Tensor, got list"),
        ({"qkv": QKV[:, :2]}, ValueError, r"qkv: expected shape \[T, 3, A, D\] or \[T, A, D\] with .* \[6, 2, 2, 8\]"),
        ({"qkv": QKV[..., :7]}, ValueError, r"qkv: expected shape .* with an even D, got \[6, 3, 2, 7\]"),
        ({"qkv": QKV[..., :0]}, ValueError, r"qkv: expected shape .* with an even D, got \[6, 3, 2, 0\]"),
        ({"qkv": QKV[0, 0]}, ValueError, r"qkv: expected shape .*, got \[2, 8\]"),
        ({"qkv": QKV.long()}, TypeError, "qkv: expected dtype float32 or .*, got int64"),
        ({"qkv": QKV.double()}, TypeError, "cos: expected dtype float64, got float32"),
        ({"cos": TABLE.half()}, TypeError, "cos: expected dtype float32, got float16"),
        ({"cos": TABLE[:5]}, ValueError, r"cos: expected shape \[6, 4\], got \[5, 4\]"),
        ({"sin": torch.zeros(T, D)}, ValueError, r"sin: expected shape \[6, 4\], got \[6, 8\]"),
        ({"sin": TABLE.to("meta")}, ValueError, "sin: expected device cpu .*, got meta"),
        ({"sin": TABLE.clone().requires_grad_()}, ValueError, "sin: expected a Tensor that requires no gradient"),
        ({"interleaved": 1}, TypeError, "interleaved: expected a bool, got int"),
        ({"inplace": None}, TypeError, "inplace: expected a bool, got NoneType"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rotary(**({"qkv": QKV, "cos": TABLE, "sin": TABLE} | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"inv_freq": torch.ones(2, 3)}, ValueError, r"inv_freq: expected shape \[D / 2\], got \[2, 3\]"),
        ({"inv_freq": torch.ones(4).half()}, TypeError, "inv_freq: expected dtype float32 or float64, got float16"),
        ({"positions": torch.zeros(2, 3)}, ValueError, r"positions: expected shape \[T\], got \[2, 3\]"),
        (
            {"positions": torch.ones(3).bool()},
            TypeError,
            "positions: expected an integer or floating-point",
        ),
        ({"positions": torch.ones(3, device="meta")}, ValueError, "positions: expected device cpu"),
        ({"scaling": "1"}, TypeError, "scaling: expected a number, got str"),
    ],
)
def test_messages_of_tables(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rotary_tables(**({"inv_freq": torch.ones(4), "positions": torch.arange(3)} | changed))
