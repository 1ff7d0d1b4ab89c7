"""Every op, none forgotten: `torch.library.opcheck`, and one full graph of forward and backward for all sizes.

A sample is a call of a public function. What registered ops it reaches, and with which arguments, is recorded and
checked; a registered op that no sample reaches fails the tests, so does an op of the table without a sample.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import backend, ops
from bert_fast.ops import optimizer
from bert_fast.ops.encoder_layer import _op as registered_layer

SEED = torch.tensor([77])
COLUMNS = 16


@dataclass(frozen=True)
class Sample:
    """A function of tensors and numbers, and what to call it with for a number of tokens."""

    function: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def coords_of(tokens: int) -> Tensor:
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack((index // 4, index % 4), 1)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, coords: Tensor) -> Tensor:
    return ops.attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, dropout_p=0.2, seed=SEED, coords_q=coords, site=9
    )


def attention_with_extras(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, order: Tensor,
                          bias: Tensor, relative_keys: Tensor, relative_queries: Tensor) -> Tensor:  # fmt: skip
    return ops.attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, causal=True, bias=bias,
        relative_keys=relative_keys, relative_queries=relative_queries, sequence_order=order,
    )  # fmt: skip


def attention_qkv(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, coords: Tensor) -> Tensor:
    return ops.attention_qkv(
        qkv, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, dropout_p=0.2, seed=SEED, coords=coords, site=9
    )


def attention_qkv_with_extras(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, bias: Tensor,
                              relative_keys: Tensor, relative_queries: Tensor) -> Tensor:  # fmt: skip
    return ops.attention_qkv(
        qkv, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, causal=True, bias=bias,
        relative_keys=relative_keys, relative_queries=relative_queries,
    )  # fmt: skip


def attention_arguments(tokens: int) -> tuple[Any, ...]:
    cu_seqlens = torch.tensor([0, 2, tokens], dtype=torch.int32)
    return *(leaf(tokens, 2, 8) for _ in range(3)), cu_seqlens, tokens - 2, coords_of(tokens)


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    """Of relative positions."""
    return leaf(2 * tokens - 1, 2, 8), leaf(2 * tokens - 1, 2, 8)


def attention_extras_arguments(tokens: int) -> tuple[Any, ...]:
    *of_attention, _ = attention_arguments(tokens)
    extras = leaf(2, 1, tokens, tokens), *tables(tokens)
    return *of_attention, torch.tensor([1, 0], dtype=torch.int32), *extras


def attention_qkv_arguments(tokens: int) -> tuple[Any, ...]:
    return leaf(tokens, 3, 2, 8), torch.tensor([0, 2, tokens], dtype=torch.int32), tokens - 2, coords_of(tokens)


def attention_qkv_extras_arguments(tokens: int) -> tuple[Any, ...]:
    *of_attention, _ = attention_qkv_arguments(tokens)
    return *of_attention, leaf(2, 1, tokens, tokens), *tables(tokens)


def dropout_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, coords: Tensor):
    return ops.dropout_add_layer_norm(
        x, residual, weight, bias, x_bias=x_bias, dropout_p=0.2, seed=SEED, coords=coords, site=3
    )


def embedding(words: Tensor, word_table: Tensor, type_table: Tensor, position_table: Tensor, weight: Tensor,
              bias: Tensor, coords: Tensor) -> Tensor:  # fmt: skip
    return ops.embedding(
        words, word_table, type_table, weight, bias, token_type_ids=words % 2, position_ids=coords[:, 1].long(),
        position_table=position_table, padding_idx=0, dropout_p=0.2, seed=SEED, coords=coords, site=0,
    )  # fmt: skip


def embedding_arguments(tokens: int) -> tuple[Any, ...]:
    tables = (leaf(20, COLUMNS), leaf(2, COLUMNS), leaf(8, COLUMNS))
    return torch.arange(tokens) % 20, *tables, leaf(COLUMNS), leaf(COLUMNS), coords_of(tokens)


def cross_entropy_arguments(tokens: int) -> tuple[Any, ...]:
    return leaf(tokens, 30), torch.where(torch.arange(tokens) % 3 == 0, -100, torch.arange(tokens))


def encoder_layer_arguments(tokens: int) -> tuple[Any, ...]:
    cu_seqlens, wide, narrow = torch.tensor([0, 2, tokens], dtype=torch.int32), (24, COLUMNS), (COLUMNS, 24)
    shapes = [*[(COLUMNS, COLUMNS), (COLUMNS,)] * 4, (COLUMNS,), (COLUMNS,), wide, (24,), narrow, *[(COLUMNS,)] * 3]
    index = torch.arange(tokens, dtype=torch.int32)
    coords = torch.stack((index >= 2, index), 1).int()
    return leaf(tokens, COLUMNS), *(leaf(*shape) for shape in shapes), cu_seqlens, tokens - 2, coords


def encoder_layer(*given: Any, rows: Tensor | None = None) -> Tensor:
    *tensors, cu_seqlens, max_seqlen, coords = given
    cu_seqlens_q = cu_seqlens if rows is None else torch.searchsorted(rows, cu_seqlens.long(), out_int32=True)
    coords_q = coords if rows is None else coords.index_select(0, rows)
    return registered_layer(
        *tensors, rows, cu_seqlens_q, cu_seqlens, max_seqlen, max_seqlen, coords_q, coords, None, 2, rows is not None,
        "gelu", 0.1, 0.2, 0.2, SEED, 1, 2, 3, 1e-12, 1e-12, "input", "device", True, backend.requested(),
    )[0]  # fmt: skip


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return ops.linear_cross_entropy(x, weight, bias, labels, label_smoothing=0.1)


def linear_cross_entropy_arguments(tokens: int) -> tuple[Any, ...]:
    labels = torch.where(torch.arange(tokens) % 3 == 0, -100, torch.arange(tokens))
    return leaf(tokens, COLUMNS), leaf(30, COLUMNS), leaf(30), labels


def splade_arguments(tokens: int) -> tuple[Any, ...]:
    return leaf(tokens, COLUMNS), leaf(30, COLUMNS), leaf(30), torch.tensor([0, 2, 2, tokens], dtype=torch.int32)


def maxsim(queries: Tensor, documents: Tensor, of_queries: Tensor, of_documents: Tensor, longest: int) -> Tensor:
    return ops.maxsim(queries, documents, cu_seqlens_q=of_queries, cu_seqlens_d=of_documents, max_seqlen_d=longest)


def maxsim_arguments(tokens: int) -> tuple[Any, ...]:
    of_queries, of_documents = (torch.tensor(t, dtype=torch.int32) for t in ([0, 2, tokens], [0, 3, 3, 9]))
    return leaf(tokens, COLUMNS), leaf(9, COLUMNS), of_queries, of_documents, 6


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, **options: bool) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    return ops.rotary(qkv, cos.to(wide), sin.to(wide), **options)


def rotary_arguments(tokens: int) -> tuple[Any, ...]:
    angle = torch.arange(4.0 * tokens).view(tokens, 4)
    return leaf(tokens, 3, 2, 8), angle.cos(), angle.sin()


def step(function: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """An optimizer step as a function of its tensors: what it overwrites is what it returns."""

    def stepped(p: Tensor, g: Tensor, m: Tensor, v: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        changed = tuple(t.clone() for t in (p, m, v, count))
        new_p, new_m, new_v, new_count = changed
        norm = optimizer.global_norm([g])
        function([new_p], [g], [new_m], [new_v], [new_count], lr=1e-2, grad_norm=norm, max_grad_norm=0.5)
        return changed

    return stepped


def step_arguments(tokens: int) -> tuple[Any, ...]:
    p, g, m, v = torch.randn(4, tokens, COLUMNS).unbind()
    return p, g, m, v.square(), torch.tensor(3.0)


def rows(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    """Leaves: [tokens, COLUMNS], then these shapes."""
    return lambda tokens: (leaf(tokens, COLUMNS), *(leaf(*shape) for shape in shapes))


# "op" or "op: what else"
SAMPLES = {
    "attention": Sample(attention, attention_arguments),
    "attention: with extras": Sample(attention_with_extras, attention_extras_arguments),
    "attention: of qkv": Sample(attention_qkv, attention_qkv_arguments),
    "attention: of qkv, with extras": Sample(attention_qkv_with_extras, attention_qkv_extras_arguments),
    "bias_gelu": Sample(lambda x, bias: ops.bias_gelu(x, bias), rows((COLUMNS,))),
    "bias_gelu: without bias": Sample(lambda x: ops.bias_gelu(x, approximate="tanh"), rows()),
    "cross_entropy": Sample(
        lambda logits, labels: ops.cross_entropy(logits, labels, label_smoothing=0.1), cross_entropy_arguments
    ),
    "dropout": Sample(
        lambda x, coords: ops.dropout(x, 0.3, seed=SEED, coords=coords, site=2),
        lambda tokens: (leaf(tokens, COLUMNS), coords_of(tokens)),
    ),
    "dropout_add_layer_norm": Sample(
        dropout_add_layer_norm,
        lambda tokens: (
            leaf(tokens, COLUMNS), leaf(tokens, COLUMNS), *(leaf(COLUMNS) for _ in range(3)), coords_of(tokens)
        ),
    ),
    "embedding": Sample(embedding, embedding_arguments),
    "encoder_layer": Sample(encoder_layer, encoder_layer_arguments),
    "encoder_layer: of a few rows, causal": Sample(
        lambda *given: encoder_layer(*given[:-1], rows=given[-1]),
        lambda tokens: (*encoder_layer_arguments(tokens), torch.tensor([0, tokens - 1])),
    ),
    "layer_norm": Sample(
        lambda x, weight, bias: ops.layer_norm(x, weight, bias), rows((COLUMNS,), (COLUMNS,))
    ),
    "linear": Sample(lambda x, weight, bias: ops.linear(x, weight, bias), rows((8, COLUMNS), (8,))),
    "linear: without bias": Sample(lambda x, weight: ops.linear(x, weight), rows((8, COLUMNS))),
    "linear_cross_entropy": Sample(linear_cross_entropy, linear_cross_entropy_arguments),
    "linear_cross_entropy: without bias": Sample(
        lambda x, weight, labels: linear_cross_entropy(x, weight, None, labels),
        lambda tokens: (leaf(tokens, COLUMNS), leaf(30, COLUMNS), torch.arange(tokens)),
    ),
    "linear_cross_entropy: groups": Sample(
        lambda x, weight, labels, rows, classes: ops.linear_cross_entropy(
            x, weight, None, labels, row_groups=rows, class_groups=classes
        ),
        lambda tokens: (
            leaf(tokens, COLUMNS),
            leaf(30, COLUMNS),
            torch.arange(tokens),
            torch.arange(tokens) % 5,
            torch.arange(30) % 7,
        ),
    ),
    "linear_gelu": Sample(lambda x, weight, bias: ops.linear_gelu(x, weight, bias), rows((8, COLUMNS), (8,))),
    "linear_gelu: tanh": Sample(
        lambda x, weight, bias: ops.linear_gelu(x, weight, bias, approximate="tanh"), rows((8, COLUMNS), (8,))
    ),
    "linear: constant weight": Sample(lambda x, bias: ops.linear(x, x.new_ones(8, COLUMNS), bias), rows((8,))),
    "linear_gelu: recomputed": Sample(
        lambda x, weight, bias: ops.linear_activation(x, weight, bias, hidden_act="silu", save_pre=False),
        rows((8, COLUMNS), (8,)),
    ),
    "linear_int8": Sample(
        lambda x, weight, bias: ops.linear_int8(x.detach().float(), ops.quantize_weight(weight), bias),
        lambda tokens: (torch.randn(tokens, COLUMNS), torch.randn(20, COLUMNS), torch.randn(20)),
    ),
    "maxsim": Sample(maxsim, maxsim_arguments),
    "maxsim: constant queries": Sample(
        lambda documents, *rest: maxsim(documents.detach(), documents, *rest),
        lambda tokens: (leaf(tokens, COLUMNS), *[torch.tensor([0, 2, tokens], dtype=torch.int32)] * 2, tokens),
    ),
    "mlp": Sample(
        lambda *arguments: ops.mlp(*arguments), rows((24, COLUMNS), (24,), (COLUMNS, 24), (COLUMNS,))
    ),
    "mlp: recomputed, without down bias": Sample(
        lambda *arguments: ops.mlp(*arguments, hidden_act="tanh", save_pre=False),
        rows((24, COLUMNS), (24,), (COLUMNS, 24)),
    ),
    "gated_mlp": Sample(
        lambda *given: ops.gated_mlp(*given[:-1], dropout_p=0.2, seed=SEED, coords=given[-1], site=7),
        lambda tokens: (*rows(*[(24, COLUMNS), (24,)] * 2, (COLUMNS, 24), (COLUMNS,))(tokens), coords_of(tokens)),
    ),
    "gated_mlp: recomputed, without biases": Sample(
        lambda x, gate, up, down: ops.gated_mlp(x, gate, None, up, None, down, hidden_act="gelu", save_pre=False),
        rows(*[(24, COLUMNS)] * 2, (COLUMNS, 24)),
    ),
    "optimizer: adamw": Sample(step(optimizer.adamw_step), step_arguments),
    "optimizer: lamb": Sample(step(optimizer.lamb_step), step_arguments),
    "qkv_projection": Sample(
        lambda *arguments: ops.qkv_projection(*arguments),
        rows(*[shape for _ in range(3) for shape in ((8, COLUMNS), (8,))]),
    ),
    "qkv_projection: without biases": Sample(
        lambda x, wq, wk, wv: ops.qkv_projection(x, wq, None, wk, None, wv, None), rows(*[(8, COLUMNS)] * 3)
    ),
    "splade": Sample(lambda *arguments: ops.splade(*arguments), splade_arguments),
    "splade: without bias, log1p twice": Sample(
        lambda x, weight, _, cu_seqlens: ops.splade(x, weight, None, cu_seqlens, activation="log1p_relu"),
        lambda tokens: (*splade_arguments(tokens)[:2], None, splade_arguments(tokens)[3]),
    ),
    "rotary": Sample(lambda *arguments: rotary(*arguments), rotary_arguments),
    "rotary: interleaved, of a product": Sample(
        lambda qkv, *tables: rotary(qkv * 2, *tables, interleaved=True, inplace=True), rotary_arguments
    ),
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Notes the first call of every registered op: the op, and copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bert_fast":
            assert not kwargs
            copies = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.preserve_format), args)
            self.calls.setdefault(func._schema.name.split("::")[1], (func, copies))
        return func(*args, **(kwargs or {}))


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def transpose(t: Tensor) -> Tensor:
    """The same values, neighbours in memory along the first dimension."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t


def run(
    function: Callable[..., Any], arguments: tuple[Any, ...], relaid: Callable[[Tensor], Tensor] = lambda t: t
) -> list[Tensor]:
    """Outputs, then gradients of all leaves; upstream gradients are the same every time, laid out by `relaid`."""
    outputs = tensors_of(function(*arguments))
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    generator = torch.Generator().manual_seed(1)
    upstream = [relaid(torch.randn(y.shape, generator=generator).to(y.dtype)) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream) if leaves else ()
    return [y.detach() for y in outputs] + list(gradients)


def record(
    sample: Sample, dtype: torch.dtype = torch.float32, relaid: Callable[[Tensor], Tensor] = lambda t: t
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The registered ops that the sample reaches: leaves in this dtype, every floating tensor laid out by `relaid`."""

    def prepared(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        moved = relaid(t.detach().to(dtype) if t.requires_grad else t)
        return moved.requires_grad_(t.requires_grad)

    arguments = pytree.tree_map_only(Tensor, prepared, sample.make(5))
    # As within a compiled graph: some public functions go around PyTorch's dispatcher elsewhere.
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True), Recorder() as recorder:
        run(sample.function, arguments, relaid)
    return recorder.calls


def registered_ops() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("bert_fast::")}


def test_every_op_has_a_sample() -> None:
    assert {name.split(":")[0] for name in SAMPLES} == set(backend.op_names())


def test_samples_reach_every_registered_op() -> None:
    reached = {name for sample in SAMPLES.values() for name in record(sample)}
    assert reached == registered_ops()


def with_gradients(func: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as a user has them: floating tensors want gradients where the op has a formula for them."""
    has_formula = torch._C._dispatch_has_kernel_for_dispatch_key(func._schema.name, "Autograd")
    if not has_formula or func._schema.name.endswith("_bwd") or func._schema.is_mutable:
        return arguments
    return pytree.tree_map_only(
        Tensor, lambda t: t.requires_grad_() if t.is_floating_point() and t.dim() else t, arguments
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    calls = record(SAMPLES[name])
    assert calls
    for func, arguments in calls.values():
        torch.library.opcheck(func, with_gradients(func, arguments))


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SAMPLES)
def test_one_full_graph_for_all_sizes(no_recompiles: None, name: str) -> None:
    sample = SAMPLES[name]
    compiled = torch.compile(sample.function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9, 12):
        arguments = sample.make(tokens)
        for eager, graph in zip(run(sample.function, arguments), run(compiled, arguments), strict=True):
            assert torch.equal(eager, graph)


@pytest.mark.slow
def test_inductor_takes_ops_as_they_are(no_recompiles: None) -> None:
    """PyTorch's compiler makes C++ of the arithmetic around ops: one graph for all sizes, with the same bits."""
    chain = ("embedding", "dropout_add_layer_norm", "layer_norm", "bias_gelu", "linear_cross_entropy")

    def function(*given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        (words, *tables), *others, (logits, labels) = given
        x = SAMPLES["embedding"].function(words, *tables)
        for name, rest in zip(chain[1:], others, strict=True):
            x = SAMPLES[name].function(x, *rest)
        return x, ops.cross_entropy(logits * 2, labels, label_smoothing=0.1)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 12):
        made = [SAMPLES[name].make(tokens) for name in (*chain, "cross_entropy")]
        given = [made[0], *(one[1:] for one in made[1:-1]), made[-1]]
        leaves = [t for one in given for t in one if isinstance(t, Tensor) and t.requires_grad]
        eager, graph = (
            [*(loss := f(*given)), *torch.autograd.grad(loss, leaves, [torch.tensor(-3.0)] * 2)]
            for f in (function, compiled)
        )
        assert all(map(torch.equal, eager, graph))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("back_end", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("relaid", [lambda t: t, transpose], ids=["contiguous", "transposed"])
def test_outputs_are_laid_out_as_graphs_are_told(
    name: str, back_end: str, dtype: torch.dtype, relaid: Callable[[Tensor], Tensor]
) -> None:
    """Compiled code trusts the fake implementations: a wrong stride there is silently wrong data."""
    with backend.use_backend(back_end):
        calls = record(SAMPLES[name], dtype, relaid)
    for func, arguments in calls.values():
        torch.library.opcheck(
            func, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )


def results_of(func: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """What an op returns, and what it has written to, of copies of its arguments."""
    arguments = pytree.tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), arguments)
    return pytree.tree_leaves((func(*arguments), arguments))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("back_end", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_nothing_within_an_op(name: str, back_end: str, dtype: torch.dtype) -> None:
    """Public functions cast operands; fp32 products of the reference are its own and stay so."""
    with backend.use_backend(back_end):
        calls = record(SAMPLES[name], dtype)
    for func, arguments in calls.values():
        outside = results_of(func, arguments)
        with torch.autocast("cpu", torch.bfloat16):
            within = results_of(func, arguments)
        for expected, actual in zip(outside, within, strict=True):
            assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected
