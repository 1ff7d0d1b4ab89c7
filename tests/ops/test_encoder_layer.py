"""A layer as one op: the bits of the ops that it consists of, what it keeps, its derivative, and its refusals."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bert_fast import use_backend
from bert_fast.modules import layer as module
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops import Packing, encoder_layer
from bert_fast.reference import encoder_layer as reference

SEED = torch.tensor([1234])
LENGTHS = (5, 0, 1, 7)


def make_layer(dtype: torch.dtype = torch.float32, **changes: Any) -> BertLayer:
    config = SimpleNamespace(**{
        "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", **changes,
    })  # fmt: skip
    layer = BertLayer(config, 3)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    return layer.to(dtype)


def make_call(rows: str = "all", causal: bool = False, seed: Tensor | None = SEED) -> Call:
    keep = torch.arange(8)[None] < torch.tensor(LENGTHS)[:, None]
    call = Call(Packing.from_keep_mask(keep), seed, causal=causal)
    chosen = {"all": None, "some": torch.tensor([0, 3, 5, 12]), "none": torch.tensor([], dtype=torch.long)}[rows]
    return call.with_rows(chosen)


@contextmanager
def op_by_op() -> Iterator[None]:
    with mock.patch.object(module, "run_whole", return_value=None):
        yield


@contextmanager
def counted() -> Iterator[list[tuple[Any, ...]]]:
    """What the op was given."""
    calls: list[tuple[Any, ...]] = []
    op = encoder_layer._op

    class Noting:
        def __call__(self, *given: Any) -> Any:
            calls.append(given)
            return op(*given)

        def around(self, needs_gradients: bool, *given: Any) -> Any:
            calls.append(given)
            return op.around(needs_gradients, *given)

    with mock.patch.object(encoder_layer, "_op", Noting()):
        yield calls


def run(layer: BertLayer, x: Tensor, call: Call, autocast: bool = False) -> dict[str, Tensor]:
    """The output, and the gradients of x and all parameters."""
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = layer(leaf.bfloat16() if autocast else leaf, call=call)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    y.backward(dy)
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad} | gradients


def assert_bits_of_single_ops(layer: BertLayer, call: Call, dtype: torch.dtype, autocast: bool = False) -> None:
    x = torch.randn(sum(LENGTHS), 24).to(dtype)
    with counted() as calls:
        whole = run(layer, x, call, autocast)
    assert len(calls) == 1
    with op_by_op():
        single = run(layer, x, call, autocast)
    assert whole.keys() == single.keys()
    different = [name for name in whole if not torch.equal(whole[name], single[name])]
    assert not different


@pytest.mark.parametrize("rows", ["all", "some", "none"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bits_of_single_ops(dtype: torch.dtype, backend: str, causal: bool, rows: str) -> None:
    with use_backend(backend):
        assert_bits_of_single_ops(make_layer(dtype), make_call(rows, causal), dtype)


@pytest.mark.parametrize("hidden_act", ["gelu_new", "relu", "silu", "tanh"])
def test_activations(hidden_act: str) -> None:
    assert_bits_of_single_ops(make_layer(hidden_act=hidden_act), make_call(), torch.float32)


@pytest.mark.parametrize("rows", ["all", "some"])
@pytest.mark.parametrize("seed", [None, SEED])
def test_under_autocast(rows: str, seed: Tensor | None) -> None:
    layer = make_layer()
    assert_bits_of_single_ops(layer, make_call(rows, seed=seed), torch.float32, autocast=True)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("dropped", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@pytest.mark.parametrize("p", [0.0, 2.0**-18, 0.5, 1.0])
def test_probabilities_of_dropping(dropped: str, p: float) -> None:
    assert_bits_of_single_ops(make_layer(**{dropped: p}), make_call(), torch.float32)


def test_a_part_in_evaluation_drops_nothing() -> None:
    layer = make_layer()
    layer.attention.output.eval()
    assert_bits_of_single_ops(layer, make_call(), torch.float32)


def test_norms_whose_input_is_kept() -> None:
    layer = make_layer()
    with torch.no_grad():
        layer.output.LayerNorm.weight[3] = 0.0
    assert_bits_of_single_ops(layer, make_call(), torch.float32)
    with torch.no_grad():
        layer.attention.output.LayerNorm.weight[3] = 0.0
    assert_bits_of_single_ops(layer, make_call("some"), torch.float32)


def test_without_biases() -> None:
    layer = make_layer()
    attention, mlp = layer.attention, (layer.intermediate, layer.output)
    for dense in (attention.self.query, attention.self.key, attention.self.value, attention.output.dense):
        dense.bias = None
    for half in mlp:
        half.dense.bias = None
    assert_bits_of_single_ops(layer, make_call(), torch.float32)
    x = torch.randn(sum(LENGTHS), 24)
    whole = run(layer, x, make_call("some"))
    with op_by_op():
        single = run(layer, x, make_call("some"))  # whose key and value are two products then
    torch.testing.assert_close(whole, single)


def noting(saved: dict[int, Tensor]) -> Any:
    """What autograd keeps, but parameters, whose memory is theirs, by address."""

    def note(t: Tensor) -> Tensor:
        if not isinstance(t, torch.nn.Parameter):
            saved[t.data_ptr()] = t
        return t

    return torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)


PARTS = [
    "attention.self.query.weight", "attention.self.value.bias", "attention.output.dense.weight",
    "attention.output.dense.bias", "attention.output.LayerNorm.weight", "intermediate.dense.weight",
    "intermediate.dense.bias", "output.dense.weight", "output.dense.bias", "output.LayerNorm.bias",
]  # fmt: skip


@pytest.mark.parametrize("rows", ["all", "some"])
@pytest.mark.parametrize("trained", [*PARTS, "x"])
def test_what_is_not_wanted_is_neither_made_nor_kept(trained: str, rows: str) -> None:
    layer, call = make_layer(), make_call(rows)
    for name, p in layer.named_parameters():
        p.requires_grad_(name == trained)
    x = torch.randn(sum(LENGTHS), 24)
    kept, results = [], []
    for manner in (nullcontext(), op_by_op()):
        leaf = x.clone().requires_grad_(trained == "x")
        saved: dict[int, Tensor] = {}
        with manner, noting(saved):
            y = layer(leaf, call=call)
        saved.pop(leaf.data_ptr(), None)  # the caller's, like parameters
        kept.append(sum(t.nbytes for t in saved.values()))
        y.sum().backward()
        results.append([y.detach(), *(t.grad for t in (leaf, *layer.parameters()) if t.grad is not None)])
        layer.zero_grad()
    assert len(results[0]) == len(results[1]) == 2 and all(map(torch.equal, *results))
    assert kept[0] <= kept[1]


def test_without_gradients_nothing_is_kept() -> None:
    layer, x = make_layer().eval(), torch.randn(sum(LENGTHS), 24)
    with torch.no_grad(), counted() as calls:
        y = layer(x, call=make_call())
    a = reference.EncoderLayer(*calls[0][:-1])
    assert not a.keeps and not y.requires_grad
    made = reference.encoder_layer_fwd(a)
    assert made[1:] == (None,) * len(reference.Saved._fields)


def test_a_rewritten_buffer_of_offsets_changes_no_gradient() -> None:
    layer, x = make_layer(), torch.randn(sum(LENGTHS), 24)
    call = make_call()
    expected = run(layer, x, call)
    leaf = x.clone().requires_grad_()
    y = layer(leaf, call=call)
    call.packing.cu_seqlens.fill_(0)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)))
    assert leaf.grad is not None and torch.equal(leaf.grad, expected["x"])


@pytest.mark.parametrize("rows", ["all", "some"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_finite_differences(causal: bool, rows: str) -> None:
    layer = make_layer(torch.float64, hidden_size=6, intermediate_size=5, num_attention_heads=2)
    parameters = dict(layer.named_parameters())

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,), {"call": call})

    call = make_call(rows, causal)
    inputs = torch.randn(sum(LENGTHS), 6, dtype=torch.float64), *(p.detach() for p in parameters.values())
    with use_backend("reference"), counted() as calls:
        assert torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in inputs], fast_mode=True)
    assert calls


class Wrapper(torch.nn.Module):
    """What holds a module in its place, and calls it."""

    def __init__(self, wrapped: torch.nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)


class Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def watch(name: str) -> Any:
    return lambda layer: layer.get_submodule(name).register_forward_hook(lambda *_: None)


def replace(name: str, wrap: Any) -> Any:
    def change(layer: BertLayer) -> None:
        parent, _, child = name.rpartition(".")
        setattr(layer.get_submodule(parent), child, wrap(layer.get_submodule(name)))

    return change


def override(layer: BertLayer) -> None:
    module = layer.attention.output
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)  # type: ignore[method-assign]


LOOKING = {
    **{f"a hook on {name}": watch(name) for name, _ in make_layer().named_modules() if name},
    **{f"{name} in a wrapper": replace(name, Wrapper) for name in ("attention", "attention.self", "attention.output")},
    "a linear layer of another class": replace("output.dense", lambda old: Doubled(old.in_features, old.out_features)),
    "a callable for an activation": lambda layer: setattr(layer.intermediate, "hidden_act", torch.tanh),
    "a forward of the object's own": override,
    "parameters of two dtypes": lambda layer: layer.output.LayerNorm.double(),
    "a parametrization": lambda layer: torch.nn.utils.parametrizations.weight_norm(layer.intermediate.dense),
}  # fmt: skip


@pytest.mark.parametrize("who", LOOKING)
def test_where_somebody_looks_inside_the_layer_runs_op_by_op(who: str) -> None:
    layer, x = make_layer(), torch.randn(sum(LENGTHS), 24)
    LOOKING[who](layer)
    refused = pytest.raises(TypeError, match="weight") if who == "parameters of two dtypes" else nullcontext()
    with counted() as calls, refused:  # by the single op
        layer(x, call=make_call())
    assert not calls


def test_global_hooks_and_modes_are_who_looks_too() -> None:
    layer, x = make_layer(), torch.randn(sum(LENGTHS), 24)
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    with counted() as calls:
        layer(x, call=make_call())
        handle.remove()
        with FlopCounterMode(display=False):
            layer(x, call=make_call())
        assert not calls and "BertSelfAttention" in seen
        layer(x, call=make_call())
    assert len(calls) == 1


def test_an_eps_that_is_no_number_is_refused_by_name() -> None:
    layer = make_layer()
    layer.output.LayerNorm.eps = float("nan")
    with pytest.raises(ValueError, match="eps: expected a finite number, got nan"):
        layer(torch.randn(sum(LENGTHS), 24), call=make_call())


def given(rows: str = "all") -> tuple[Any, ...]:
    """Arguments of the registered op."""
    with torch.no_grad(), counted() as calls:
        make_layer()(torch.randn(sum(LENGTHS), 24), call=make_call(rows))
    values = list(calls[0])
    values[place("keeps")] = False  # in training a layer on the CPU keeps, to have the same bits
    return tuple(values)


def place(name: str) -> int:
    return reference.EncoderLayer._fields.index(name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("coords_q", torch.zeros(3, 2, dtype=torch.int32), "coords_q: expected 13 tokens .* got 3"),
        ("key_bias", None, "query_bias: expected all three biases .* or none, got some"),
        ("num_heads", 5, r"num_heads: expected a divisor of the rows of query_weight \(24\), got 5"),
        ("num_heads", 0, "num_heads: expected at least 1, got 0"),
        ("attention_dropout_p", 1.5, r"attention_dropout_p: expected a probability in \[0, 1\], got 1.5"),
        ("probabilities_site", -1, r"site: expected a number in \[0, 2\*\*31\), got -1"),
        ("seed", None, "seed: expected a Tensor, got None"),
        ("saves", "all", "saves: expected one of input, output, device, again, got 'all'"),
        ("max_seqlen_q", 2, r"max_seqlen_q: expected at least the longest sequence \(7\), got 2"),
        ("down_weight", torch.zeros(24, 41), r"down_weight: expected shape \[24, 40\], got \[24, 41\]"),
    ],
)
def test_refusals_of_the_registered_op(name: str, value: Any, message: str) -> None:
    arguments = list(given())
    arguments[place(name)] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.bert_fast.encoder_layer_fwd(*arguments)


def test_backward_of_what_was_not_kept_is_refused() -> None:
    arguments = list(given())
    arguments[0] = arguments[0].clone().requires_grad_()
    y = torch.ops.bert_fast.encoder_layer_fwd(*arguments)[0]
    with pytest.raises(ValueError, match="keeps: expected True where gradients are wanted, got False"):
        y.sum().backward()


@pytest.mark.parametrize("rows", ["all", "some"])
def test_a_profiled_step_without_dropout(rows: str) -> None:
    """Backward then takes the dispatcher, and is not given the coordinates of tokens, which nothing reads."""
    layer, call = make_layer(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), make_call(rows)
    x = torch.randn(sum(LENGTHS), 24)
    expected = run(layer, x, call)
    with torch.autograd.profiler.profile():
        found = run(layer, x, call)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
