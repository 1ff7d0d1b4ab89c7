"""The feed-forward half of a layer: names of a configuration and callables, what is kept, parameters, hooks."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.modules.mlp import BertIntermediate, BertOutput
from bert_fast.ops.packing import Packing
from bert_fast.reference.activations import ACTIVATIONS, activation_fwd
from bert_fast.testing.compare import assert_close_to_truth

SIZES = dict(
    hidden_size=12, intermediate_size=20, num_attention_heads=2, layer_norm_eps=1e-12, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
CALL = Call(Packing.full(1, 7, torch.device("cpu")))


def halves(hidden_act: object = "gelu", **changes: object) -> tuple[BertIntermediate, BertOutput]:
    config = SimpleNamespace(**{**SIZES, "hidden_act": hidden_act, **changes})
    parts = BertIntermediate(config), BertOutput(config, 0)
    for parameter in (p for part in parts for p in part.parameters()):
        nn.init.normal_(parameter, std=0.5)
    return parts


def run(function, x: Tensor, dy: Tensor, parameters: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, (leaf, *parameters), dy)]


@pytest.mark.parametrize("hidden_act", [*sorted(ACTIVATIONS), F.softplus])
def test_is_the_textbook_block(hidden_act) -> None:  # type: ignore[no-untyped-def]
    """Of `nn.Linear`, an activation, `nn.Linear`, an addition and `nn.LayerNorm`; forward and all gradients."""
    intermediate, output = halves(hidden_act)
    parameters = [*intermediate.parameters(), *output.parameters()]
    x, dy = torch.randn(2, 7, 12).unbind()

    def textbook(dtype: torch.dtype):  # type: ignore[no-untyped-def]
        copies = [p.detach().to(dtype, copy=True).requires_grad_() for p in parameters]
        up, up_bias, down, down_bias, weight, bias = copies

        def function(x: Tensor) -> Tensor:
            act = activation_fwd(F.linear(x, up, up_bias), hidden_act)
            return F.layer_norm(x + F.linear(act, down, down_bias), (12,), weight, bias, 1e-12)

        return run(function, x.to(dtype), dy.to(dtype), copies)

    actual = run(lambda x: output(x, intermediate, call=CALL), x, dy, parameters)
    names = ("y", "dx", "dup_weight", "dup_bias", "ddown_weight", "ddown_bias", "dweight", "dbias")
    for name, *outputs in zip(names, actual, textbook(torch.float32), textbook(torch.float64), strict=True):
        assert_close_to_truth("mlp", name, *outputs)


def kept_shapes(hidden_act: object) -> list[tuple[int, ...]]:
    intermediate, output = halves(hidden_act)
    own = {p.data_ptr() for part in (intermediate, output) for p in part.parameters()}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y = output(torch.randn(7, 12, requires_grad=True), intermediate, call=CALL)
    del y
    return sorted(tuple(t.shape) for address, t in kept.items() if address not in own and t.shape[-1] == 20)


def test_the_activation_is_not_kept() -> None:
    assert kept_shapes("gelu") == [(7, 20)]
    assert len(kept_shapes(F.softplus)) > 1  # a callable keeps what PyTorch keeps


def test_parameters_have_the_names_of_hugging_face() -> None:
    layer = BertLayer(SimpleNamespace(**SIZES, hidden_act="gelu"), 0)
    names = {name for name, _ in layer.named_parameters() if not name.startswith("attention.")}
    assert names == {
        "intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight", "output.dense.bias",
        "output.LayerNorm.weight", "output.LayerNorm.bias",
    }  # fmt: skip


def test_hooks_of_the_output_see_the_layer_s_result() -> None:
    intermediate, output = halves()
    seen = []
    output.register_forward_hook(lambda module, arguments, result: seen.append(result))
    y = output(torch.randn(7, 12), intermediate, call=CALL)
    assert len(seen) == 1 and seen[0] is y


@pytest.mark.parametrize("compiles", [False, True])
def test_hooks_of_the_intermediate_see_the_activation(compiles: bool) -> None:
    intermediate, output = halves()
    x, seen = torch.randn(7, 12), []
    fused = output(x, intermediate, call=CALL)
    handle = intermediate.register_forward_hook(lambda module, arguments, result: seen.append(result))
    call = torch.compile(output, backend="aot_eager") if compiles else output
    torch.testing.assert_close(call(x, intermediate, call=CALL), fused)
    torch.testing.assert_close(seen, [F.gelu(intermediate.dense(x))])
    handle.remove()
    assert torch.equal(call(x, intermediate, call=CALL), fused) and len(seen) == 1


def test_intermediate_alone() -> None:
    intermediate, _ = halves()
    x = torch.randn(7, 12)
    torch.testing.assert_close(intermediate(x, call=CALL), F.gelu(intermediate.dense(x)))


def test_unknown_name() -> None:
    intermediate, output = halves("geglu")
    with pytest.raises(ValueError, match=r"hidden_act: expected one of .*, got 'geglu'"):
        output(torch.randn(7, 12), intermediate, call=CALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_keeps_no_half_precision_weights(dtype: torch.dtype) -> None:
    intermediate, output = halves()
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", dtype=dtype):
        y = output(torch.randn(7, 12, requires_grad=True), intermediate, call=CALL)
    assert not [t for t in kept if t.dtype == dtype and t.shape in ((20, 12), (12, 20))]
    y.float().square().sum().backward()
    gradients = [p.grad for part in (intermediate, output) for p in part.parameters()]
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)
