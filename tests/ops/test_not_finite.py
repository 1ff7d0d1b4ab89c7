"""NaN, infinities and overflows come out of every op where plain PyTorch has them, forward and backward.

One element or one row of one argument is NaN, inf, -inf or so large that its square overflows. Then every element that
is not finite in PyTorch's composition is not finite in ours, and a row that is finite there is finite here: nothing is
hidden, and nothing reaches a neighbour. LayerNorm is stricter than PyTorch's, see `layer_norm` below.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bert_fast
from bert_fast import native, ops
from bert_fast.ops.encoder_layer import _op as encoder_layer_op
from bert_fast.ops.optimizer import adamw_step
from bert_fast.testing.splade import plain_splade

T, H, WIDE, HEADS, CLASSES = 7, 24, 40, 3, 30
CU_SEQLENS = torch.tensor([0, 1, 3, 7], dtype=torch.int32)
COORDS = torch.tensor([[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [2, 3]], dtype=torch.int32)
LABELS = torch.tensor([3, -100, 0, 29, 5, -100, 7])
SEED = torch.tensor([5])
IDS = torch.tensor([1, 2, 3, 3, 5, 0, 9])
EPS = 1e-12
HUGE = 1e25  # its square is infinite in fp32
SPOILS = [(torch.nan, "element"), (torch.inf, "element"), (-torch.inf, "element"), (HUGE, "element"), (HUGE, "row"),
          (torch.nan, "row")]  # fmt: skip
LEVELS = ("avx512", "avx2", "portable")
BACKENDS = ("reference", "torch", "torch, without extension", "triton")
ACTIVATIONS = {
    "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "tanh": torch.tanh,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@contextmanager
def backend_of(name: str) -> Iterator[str]:
    """A back-end, perhaps with the extension's routines in a certain instruction set, or without the extension."""
    backend, _, level = name.partition(", ")
    if level == "without extension":
        with mock.patch.object(native, "load", return_value=None):
            yield backend
        return
    if not level:
        yield backend
        return
    module = native.load()
    if module is None or level not in module.simd_levels():
        pytest.skip(f"{level}: not compiled, or not of this processor")
    module.force_simd_level(level)
    try:
        yield backend
    finally:
        module.force_simd_level("auto")


def layer_norm(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's; NaN in a row whose variance overflows, where PyTorch gives NaN or the bias by the row's length."""
    overflows = h.detach().var(-1, correction=0, keepdim=True) == torch.inf
    n = F.layer_norm(h, h.shape[-1:], eps=EPS) * torch.ones_like(h).masked_fill(overflows, torch.nan)
    return n * weight + bias


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False) -> Tensor:
    """[T, A, D], sequence by sequence; zeros where every score is -inf."""
    outs = []
    for row, (start, end) in enumerate(zip(CU_SEQLENS.tolist(), CU_SEQLENS.tolist()[1:], strict=False)):
        q_, k_, v_ = (x[start:end].transpose(0, 1) for x in (q, k, v))
        scores = q_ @ k_.transpose(1, 2) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias[row, :, : end - start, : end - start]
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        is_empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
        outs.append((weights @ v_).transpose(0, 1))
    return torch.cat(outs)


def our_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    coords = {} if bias is None and "causal" not in options else dict(coords_q=COORDS, coords_k=COORDS)
    return ops.attention(q, k, v, cu_seqlens_q=CU_SEQLENS, max_seqlen_q=4, bias=bias, **coords, **options)


def our_layer(x: Tensor, *parameters: Tensor, backend: str) -> Tensor:
    grad = torch.is_grad_enabled() and x.requires_grad
    return encoder_layer_op(
        x, *parameters, None, CU_SEQLENS, CU_SEQLENS, 4, 4, COORDS, COORDS, None, HEADS, False, "gelu", 0.0, 0.0, 0.0,
        None, 1, 2, 3, EPS, EPS, "input", "input", grad, backend,
    )[0]  # fmt: skip


TABLES = ops.rotary_tables(torch.tensor([1.0, 0.5, 0.2, 0.1]), torch.arange(T))


def plain_rotary(x: Tensor) -> Tensor:
    cos, sin = (torch.cat((table, table), -1)[:, None] for table in TABLES)
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def plain_layer(x: Tensor, *parameters: Tensor) -> Tensor:
    wq, bq, wk, bk, wv, bv, wo, bo, n1, b1, up, up_bias, down, down_bias, n2, b2 = parameters
    q, k, v = (F.linear(x, w, b).view(T, HEADS, -1) for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    z = layer_norm(F.linear(attend(q, k, v).flatten(1), wo, bo) + x, n1, b1)
    return layer_norm(F.linear(F.gelu(F.linear(z, up, up_bias)), down, down_bias) + z, n2, b2)


@dataclass(frozen=True)
class Case:
    """An op, PyTorch's composition of it, and the shapes of their arguments."""

    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    spoilt: tuple[int, ...] | None = None  # places of what becomes not finite; None: all
    compared: int | None = None  # how many of output and gradients; None: all
    normalises: bool = False
    has_routine: bool = False  # of the extension


ROWS, SQUARE, COLUMN = (T, H), (H, H), (H,)
HEAD_ROWS = (T, HEADS, 8)
LAYER = (ROWS, *(SQUARE, COLUMN) * 4, COLUMN, COLUMN, (WIDE, H), (WIDE,), (H, WIDE), COLUMN, COLUMN, COLUMN)
CASES = {
    "layer_norm": Case(
        lambda *t, backend: ops.layer_norm(*t, eps=EPS, backend=backend), layer_norm, (ROWS, COLUMN, COLUMN),
        normalises=True,
    ),
    "dropout_add_layer_norm": Case(
        lambda x, r, w, b, x_bias, backend: ops.dropout_add_layer_norm(x, r, w, b, x_bias=x_bias, backend=backend),
        lambda x, r, w, b, x_bias: layer_norm(r + (x + x_bias), w, b), (ROWS, ROWS, COLUMN, COLUMN, COLUMN),
        normalises=True, has_routine=True,
    ),
    "embedding": Case(
        lambda words, types, positions, w, b, backend: ops.embedding(
            IDS, words, types, w, b, token_type_ids=IDS % 2, position_ids=COORDS[:, 1].long(),
            position_table=positions, backend=backend,
        ),
        lambda words, types, positions, w, b: layer_norm(
            F.embedding(IDS, words) + F.embedding(IDS % 2, types) + F.embedding(COORDS[:, 1].long(), positions), w, b
        ),
        ((12, H), (2, H), (4, H), COLUMN, COLUMN), normalises=True,
    ),
    "linear": Case(ops.linear, F.linear, (ROWS, (WIDE, H), (WIDE,))),
    **{
        f"linear_gelu: {act}": Case(
            lambda *t, backend, act=act: ops.linear_activation(*t, hidden_act=act, backend=backend),
            lambda *t, function=function: function(F.linear(*t)), (ROWS, (WIDE, H), (WIDE,)),
        ) for act, function in ACTIVATIONS.items()
    },
    **{
        f"bias_gelu: {act}": Case(
            lambda *t, backend, act=act: ops.bias_activation(*t, hidden_act=act, backend=backend),
            lambda x, bias, function=function: function(x + bias), (ROWS, COLUMN),
        ) for act, function in ACTIVATIONS.items()
    },
    "mlp": Case(
        ops.mlp, lambda x, up, b, down, c: F.linear(F.gelu(F.linear(x, up, b)), down, c),
        (ROWS, (WIDE, H), (WIDE,), (H, WIDE), COLUMN),
    ),
    **{
        f"gated_mlp: {act}": Case(
            lambda *t, backend, act=act: ops.gated_mlp(*t, hidden_act=act, backend=backend),
            lambda x, gate, b, up, c, down, d, function=function: F.linear(
                function(F.linear(x, gate, b)) * F.linear(x, up, c), down, d
            ),
            (ROWS, *((WIDE, H), (WIDE,)) * 2, (H, WIDE), COLUMN),
        ) for act, function in ACTIVATIONS.items() if act in ("gelu", "silu")
    },
    "qkv_projection": Case(
        ops.qkv_projection,
        lambda x, *w: torch.cat([F.linear(x, w[i], w[i + 1]) for i in (0, 2, 4)], 1), (ROWS, *(SQUARE, COLUMN) * 3),
    ),
    "rotary": Case(
        lambda x, backend: ops.rotary(x, *TABLES, backend=backend), plain_rotary, (HEAD_ROWS,), has_routine=True
    ),
    "attention": Case(our_attention, attend, (HEAD_ROWS,) * 3, has_routine=True),
    "attention: bias": Case(our_attention, attend, (*(HEAD_ROWS,) * 3, (3, HEADS, 4, 4)), has_routine=True),
    "attention: causal": Case(  # of keys that a query does not see PyTorch's gradients are NaN, too: 0 * inf
        lambda *t, backend: our_attention(*t, causal=True, backend=backend),
        lambda *t: attend(*t, causal=True), (HEAD_ROWS,) * 3, (0,), compared=2, has_routine=True,
    ),
    "cross_entropy": Case(
        lambda z, backend: ops.cross_entropy(z, LABELS, backend=backend),
        lambda z: F.cross_entropy(z, LABELS), ((T, CLASSES),),
    ),
    "cross_entropy: smoothed": Case(
        lambda z, backend: ops.cross_entropy(z, LABELS, label_smoothing=0.1, backend=backend),
        lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1), ((T, CLASSES),),
    ),
    "linear_cross_entropy": Case(
        lambda x, w, b, backend: ops.linear_cross_entropy(x, w, b, LABELS.clamp(min=0), backend=backend),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), LABELS.clamp(min=0)), (ROWS, (CLASSES, H), (CLASSES,)),
    ),
    "splade": Case(  # plain products make NaN of 0 * inf where a token has no word's maximum
        lambda x, w, b, backend: ops.splade(x, w, b, CU_SEQLENS, backend=backend),
        lambda x, w, b: plain_splade(x, w, b, CU_SEQLENS.diff().tolist()), (ROWS, (CLASSES, H), (CLASSES,)), compared=1,
    ),
    "encoder_layer": Case(our_layer, plain_layer, LAYER, (0, 11), normalises=True, has_routine=True),
}  # fmt: skip


def spoils(case: Case, tensors: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """The tensors with one element, or one row, of one of them spoilt, and what was done."""
    for place in range(len(tensors)) if case.spoilt is None else case.spoilt:
        for value, what in SPOILS:
            spoilt = [t.clone() for t in tensors]
            row = spoilt[place][-3 if len(spoilt[place]) > 2 and what == "element" else -1].view(-1)
            part = row[:1] if what == "element" else row
            part.copy_(part.sign() * value if value == HUGE else torch.full_like(part, value))
            yield f"{what} of argument {place} {value}", spoilt


def run(function: Callable[..., Tensor], tensors: list[Tensor], needs: bool, **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_(needs) for t in tensors]
    with torch.set_grad_enabled(needs):
        y = function(*leaves, **options)
    if not needs:
        return [y]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def is_bad(t: Tensor, by_rows: bool = False) -> Tensor:
    bad = ~t.isfinite()
    return bad.flatten(1).any(1) if by_rows and t.dim() > 1 else bad


def faults(ours: list[Tensor], plain: list[Tensor]) -> list[str]:
    found = []
    for i, (one, other) in enumerate(zip(ours, plain, strict=True)):
        where = "y" if i == 0 else f"gradient {i - 1}"
        if (is_bad(other) & ~is_bad(one)).any():
            found.append(f"{where}: hidden")
        if (is_bad(one, True) & ~is_bad(other, True)).any():
            found.append(f"{where}: reaches another row")
    return found


def pairs() -> Iterator[Any]:
    """Every op on every back-end, and on every instruction set that it has a routine for."""
    for what, case in CASES.items():
        levels = [f"torch, {level}" for level in LEVELS] if case.has_routine else []
        for backend in (*BACKENDS, *levels):
            yield pytest.param(what, backend, marks=pytest.mark.interpreter if backend == "triton" else ())


@pytest.mark.parametrize(("what", "name"), pairs())
def test_table(what: str, name: str) -> None:
    case, found = CASES[what], []
    tensors = [torch.randn(shape) for shape in case.shapes]
    with backend_of(name) as backend:
        for spoilt, given in spoils(case, tensors):
            if name == "triton" and case.normalises and str(HUGE) in spoilt:
                continue  # as PyTorch's kernel on a GPU, whose rstd = 1 / sqrt(inf) = 0 gives the bias
            for needs in (True, False) if what == "encoder_layer" else (True,):
                ours, plain = run(case.ours, given, needs, backend=backend), run(case.plain, given, needs)
                got = faults(ours[: case.compared], plain[: case.compared])
                if name == "triton":  # type rows take 0 * NaN of one another, and huge scores overflow in backward
                    got = [fault for fault in got if "hidden" in fault]
                found += [f"{spoilt}, {'with' if needs else 'without'} gradients: {fault}" for fault in got]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["reference", *(f"torch, {level}" for level in LEVELS), "torch, without extension",
                                  pytest.param("triton", marks=pytest.mark.interpreter)])  # fmt: skip
def test_a_single_key_that_is_nan_is_not_taken_for_a_masked_one(name: str) -> None:
    q, k, v = torch.randn(3, T, HEADS, 8)
    k[0] = torch.nan
    with backend_of(name) as backend:
        out = our_attention(q, k, v, backend=backend)
        masked = torch.zeros(3, 1, 4, 4).index_fill(3, torch.tensor([1, 2, 3]), -torch.inf)
        masked[0, :, :, 0] = torch.nan
        biased = our_attention(q, v, v, masked, backend=backend)
    assert out[0].isnan().all() and out[1:].isfinite().all()
    assert biased[0].isnan().all() and biased[1:].isfinite().all()


@pytest.mark.parametrize("size", [1e18, 1e19, 1e20, 1e25, 1e37, 3e38])
@pytest.mark.parametrize("num_columns", [8, 24, 31, 64, 768])
def test_what_is_nan_in_a_layer_norm_of_pytorch_is_nan_here(num_columns: int, size: float) -> None:
    """In its own rounding, and of rows that it gives the bias for where their variance is infinite."""
    x = torch.randn(4, num_columns).clamp(-1, 1) * size
    weight, bias = torch.rand(2, num_columns)
    for dtype in (torch.float32, torch.bfloat16):
        given = [t.to(dtype) for t in (x, weight, bias)]
        plain = F.layer_norm(given[0], (num_columns,), *given[1:], EPS)
        for backend in ("reference", "torch"):
            ours = ops.dropout_add_layer_norm(given[0], torch.zeros_like(given[0]), *given[1:], backend=backend)
            for y in (ours, ops.layer_norm(*given, backend=backend)):
                assert not (is_bad(plain) & ~is_bad(y)).any()
                # As soon as sums of squares overflow in fp32, which is before their means do.
                squares = (given[0].double() - given[0].double().mean(1, keepdim=True)).square()
                assert is_bad(y)[squares.mean(1) > torch.finfo(torch.float32).max].all()
                assert not is_bad(y)[squares.sum(1) < torch.finfo(torch.float32).max / 2].any()


@pytest.mark.parametrize("name", ["reference", *(f"torch, {level}" for level in LEVELS), "torch, without extension"])
def test_dropout_does_not_drop_nan(name: str) -> None:
    """0 * NaN is NaN in PyTorch, and in a gradient too."""
    x, zeros = torch.randn(2, T, H).unbind()
    x[2, 5], x[4, 3] = torch.nan, torch.inf
    drops = dict(dropout_p=0.99, seed=SEED, coords=COORDS, site=1)
    with backend_of(name) as backend:
        y = ops.dropout(x, **drops, backend=backend)  # type: ignore[arg-type]
        z = ops.dropout_add_layer_norm(x, zeros, zeros[0], zeros[0], **drops, backend=backend)  # type: ignore[arg-type]
    assert y[2, 5].isnan() and y[4, 3].isnan() and is_bad(y).sum() == 2
    assert torch.equal(is_bad(z, True), is_bad(x, True))


@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_huge_weights_ends_in_nan(training: bool) -> None:
    """As an untouched one does (`BertForMaskedLM`, these sizes); the loss was a plausible number before."""
    model = bert_fast.BertForMaskedLM(
        bert_fast.BertConfig(
            vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=WIDE
        )
    )
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith("decoder"):
                module.weight.mul_(1e15)
    ids = torch.arange(16).view(2, 8)
    with torch.set_grad_enabled(training):
        assert model.train(training)(input_ids=ids, labels=ids).loss.isnan()


def test_adamw_of_gradients_that_are_not_finite_is_pytorchs() -> None:
    for backend in ("reference", "torch"):
        for value in (torch.nan, torch.inf, -torch.inf, HUGE):
            p, g = torch.randn(2, 5, 6)
            g[2, 3] = value
            leaf = p.clone().requires_grad_()
            leaf.grad = g.clone()
            torch.optim.AdamW([leaf], lr=1e-2).step()
            state = [p.clone()], [g], [torch.zeros_like(p)], [torch.zeros_like(p)], [torch.tensor(0.0)]
            adamw_step(*state, lr=1e-2, backend=backend)
            assert torch.equal(is_bad(state[0][0]), is_bad(leaf.detach()))
