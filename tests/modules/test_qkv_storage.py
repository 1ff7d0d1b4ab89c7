"""Query, key and value side by side in memory: whatever happens to a module, they stay three and results stay right.

`is_joined` says whether the one product is free; what moves the parameters apart may cost a copy, never a wrong number.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import bert_fast
from bert_fast.modules.attention import BertSelfAttention
from bert_fast.modules.call import Call
from bert_fast.ops.packing import Packing
from bert_fast.optim import AdamW, Lamb
from bert_fast.reference.qkv_projection import QkvProjection, qkv_projection_fwd
from bert_fast.storage import are_neighbours
from bert_fast.testing.compare import assert_close_to_truth

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16, initializer_range=0.3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
PROJECTIONS = ("query", "key", "value")


def config(**changes: Any) -> bert_fast.BertConfig:
    return bert_fast.BertConfig(**{**SIZES, **changes})


def make(**changes: Any) -> bert_fast.BertModel:
    """With random biases: zeros would hide that they were lost."""
    model = bert_fast.BertModel(config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def attentions(model: nn.Module) -> list[BertSelfAttention]:
    return [module for module in model.modules() if isinstance(module, BertSelfAttention)]


def is_joined(model: nn.Module) -> bool:
    found = attentions(model)
    return bool(found) and all(
        are_neighbours(*(getattr(getattr(one, name), kind) for name in PROJECTIONS))
        for one in found
        for kind in ("weight", "bias")
    )


IDS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(3))


def output(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).last_hidden_state


def assert_right(one: BertSelfAttention) -> None:
    """The projection, as the module makes it, against the reference in fp64."""
    x = torch.randn(9, one.key.weight.shape[1], dtype=one.key.weight.dtype)
    parameters = [p for name in PROJECTIONS for p in (getattr(one, name).weight, getattr(one, name).bias)]
    with torch.no_grad():
        truth = qkv_projection_fwd(QkvProjection(x.double(), *(p.double() for p in parameters)))
        plain = torch.cat([getattr(one, name)(x) for name in PROJECTIONS], dim=1)
        assert_close_to_truth("qkv_projection", "qkv", one._project(x), plain, truth)


def test_parameters_are_those_of_three_linear_layers():
    model = make()
    assert is_joined(model)
    state = model.state_dict()
    for name in PROJECTIONS:
        weight, bias = (state[f"encoder.layer.1.attention.self.{name}.{kind}"] for kind in ("weight", "bias"))
        assert weight.shape == (32, 32) and bias.shape == (32,)
        assert weight.is_contiguous() and type(getattr(attentions(model)[1], name)) is nn.Linear
    assert len({id(p) for p in attentions(model)[0].parameters()}) == 6
    assert_right(attentions(model)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_a_dtype_and_back(dtype):
    model = make()
    parameters, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    model.to(dtype)
    assert is_joined(model) and all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(value, before[key].to(dtype)) for key, value in model.state_dict().items())
    assert_right(attentions(model)[0])
    model.float()
    assert is_joined(model) and {p.dtype for p in model.parameters()} == {torch.float32}


def test_only_one_layer_is_moved():
    model = make()
    model.encoder.layer[0].attention.self.key.double()  # not by way of the module that holds the three
    assert not is_joined(model)
    with pytest.raises(TypeError, match=r"wk: expected dtype float32 \(that of x\), got float64"):
        output(model)
    model.encoder.layer[0].attention.self.key.float()
    assert_right(attentions(model)[0])
    model.to("cpu")
    assert is_joined(model)


@pytest.mark.parametrize("is_made_on_meta", [True, False])
def test_meta_and_to_empty(is_made_on_meta):
    filled = make()
    if is_made_on_meta:
        with torch.device("meta"):
            model = bert_fast.BertModel(config())
    else:
        model = make().to("meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert is_joined(model)
    model.load_state_dict(filled.state_dict())
    assert is_joined(model) and torch.equal(output(model.eval()), output(filled))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_go_to_transformers_and_back(assign):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    ours = make()
    theirs.load_state_dict(ours.state_dict(), strict=True, assign=False)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    again = make()
    again.load_state_dict(copy.deepcopy(theirs.state_dict()), strict=True, assign=assign)
    assert is_joined(again)
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value) and value.shape == again.state_dict()[key].shape
    assert_right(attentions(again)[0])


def test_files_are_not_tripled(tmp_path: Path):
    model = make(hidden_size=128, num_attention_heads=4)
    state = model.state_dict()
    size = sum(t.nbytes for t in state.values())
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    part = {key: value for key, value in state.items() if ".self.value." in key}
    save_file(part, tmp_path / "part.safetensors")
    for name in ("a.safetensors", "a.pt"):
        assert size <= (tmp_path / name).stat().st_size <= size + 20_000
    assert (tmp_path / "part.safetensors").stat().st_size <= sum(t.nbytes for t in part.values()) + 2_000
    for loaded in (load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt", weights_only=True)):
        assert all(torch.equal(loaded[key], value) for key, value in state.items())
        other = make(hidden_size=128, num_attention_heads=4)
        other.load_state_dict(loaded)
        assert torch.equal(output(other), output(model))


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_are_joined_and_their_own(duplicate: Callable[[nn.Module], nn.Module]):
    model = make()
    attentions(model)[0].key.weight.requires_grad_(False)
    other = duplicate(model)
    assert is_joined(other) and torch.equal(output(other), output(model))
    assert not attentions(other)[0].key.weight.requires_grad and attentions(other)[0].query.weight.requires_grad
    before = output(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(make().state_dict(), assign=True)
    assert is_joined(other), "the copy's own hook after loading"
    assert torch.equal(output(model), before)


def test_layers_that_share_a_query():
    model = make()
    first, second = attentions(model)
    second.query = first.query
    assert torch.equal(second.query.weight, first.query.weight)
    for change in (lambda: None, model.double, model.float, lambda: model.load_state_dict(model.state_dict())):
        change()
        assert second.query.weight is first.query.weight
        for one in (first, second):
            assert_right(one)
    output(model).square().sum().backward()
    shared = first.query.weight.grad.clone()
    explicit = copy.deepcopy(model)
    of_first, of_second = attentions(explicit)
    assert of_first.query is of_second.query
    of_second.query = copy.deepcopy(of_second.query)
    explicit.zero_grad()
    output(explicit).square().sum().backward()
    torch.testing.assert_close(shared, of_first.query.weight.grad + of_second.query.weight.grad)


def test_one_layer_for_all_three():
    one = attentions(make())[0]
    one.key = one.value = one.query
    assert_right(one)
    one.double()
    assert_right(one)
    assert one.key.weight is one.query.weight


def test_replaced_parameters_cost_a_copy_and_nothing_else():
    one = attentions(make())[0]
    one.key.weight = nn.Parameter(torch.randn(32, 32))
    assert_right(one)
    one.value = nn.Linear(32, 32)
    assert_right(one)


class Adapted(nn.Module):
    """A linear layer and a correction to it, as adapters for fine-tuning are; it offers the weight it corrects."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.low, self.high = linear, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.high(self.low(x))


def test_layers_that_are_more_than_their_weight_are_called():
    one = attentions(make())[0]
    x = torch.randn(5, 32)
    one.query = Adapted(one.query)
    calls = []
    one.value.register_forward_hook(lambda module, inputs, result: calls.append(result))
    expected = torch.cat([one.query(x), one.key(x), one.value(x)], dim=1)
    calls.clear()
    assert torch.equal(one._project(x), expected) and len(calls) == 1
    one.double()
    assert torch.equal(one._project(x.double()), torch.cat([p(x.double()) for p in (one.query, one.key, one.value)], 1))
    prune.l1_unstructured(one.key, "weight", amount=0.5)
    assert_right(one)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch.optim.AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "torch.optim.AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "torch.optim.AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2, max_grad_norm=0.1),
    "Lamb": lambda parameters: Lamb(parameters, lr=1e-2),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, set_to_none: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        hidden = output(model)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().add(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_bit_for_bit_from_saved_states(name: str, set_to_none: bool):
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2, set_to_none)
    assert is_joined(model)
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    state, optimizer_state = torch.load(buffer, weights_only=True)
    other = make()
    other.load_state_dict(state)
    other_optimizer = OPTIMIZERS[name](other.parameters())
    other_optimizer.load_state_dict(optimizer_state)
    start = output(model)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, 2, set_to_none)
    assert not torch.equal(output(model), start)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert is_joined(model) and is_joined(other)


def test_where_parameters_lie_does_not_change_training():
    model, apart = make(), make()
    apart.load_state_dict(model.state_dict())
    for one in attentions(apart):
        one.key.weight.data = one.key.weight.data.clone()
    assert not is_joined(apart)
    for one in (model, apart):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1), 3)
    for a, b in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_neighbours_and_survive_zeroing():
    model = make()
    one = attentions(model)[0]
    output(model).square().sum().backward()
    gradients = [getattr(one, name).weight.grad for name in PROJECTIONS]
    assert [g.data_ptr() - gradients[0].data_ptr() for g in gradients] == [
        0,
        gradients[0].nbytes,
        2 * gradients[0].nbytes,
    ]
    first = [g.clone() for g in gradients]
    model.zero_grad(set_to_none=False)
    assert all(
        getattr(one, name).weight.grad is g and not g.any() for name, g in zip(PROJECTIONS, gradients, strict=True)
    )
    for _ in range(2):
        output(model).square().sum().backward()
    for g, expected in zip(gradients, first, strict=True):
        torch.testing.assert_close(g, 2 * expected)
    norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    clipped = torch.stack([p.grad.norm() for p in one.parameters()]).norm()
    assert norm > 0.5 and torch.isclose(clipped, torch.tensor(0.5))


def test_a_frozen_query():
    model, free = make(), make()
    free.load_state_dict(model.state_dict())
    attentions(model)[0].query.requires_grad_(False)
    for one in (model, free):
        output(one).square().sum().backward()
    assert attentions(model)[0].query.weight.grad is None and attentions(model)[0].query.bias.grad is None
    for (name, p), q in zip(model.named_parameters(), free.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_functional_call_takes_other_parameters():
    model, other = make(), make()
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    result = torch.func.functional_call(model, given, kwargs={"input_ids": IDS}).last_hidden_state
    torch.testing.assert_close(result, output(other))
    result.square().sum().backward()
    output(other).square().sum().backward()
    for name, p in other.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(given[name].grad, p.grad)
    assert all(p.grad is None for p in model.parameters()) and is_joined(model)


def test_compiled_in_one_graph_before_and_after_a_move():
    torch._dynamo.reset()
    one = attentions(make())[0]
    packing = Packing.full(2, 5, torch.device("cpu"))
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    for change in (lambda: None, one.double, lambda: setattr(one.key, "weight", nn.Parameter(one.key.weight.clone()))):
        change()
        x = torch.randn(10, 32, dtype=one.key.weight.dtype)
        results = []
        for run in (one, compiled):
            one.zero_grad()
            run(x, call=Call(packing)).square().sum().backward()
            results.append([p.grad.clone() for p in one.parameters()])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("sizes", [(12, 4, 1), (10, 5, 2), (9, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_awkward_sizes(sizes: tuple[int, int, int], dtype: torch.dtype):
    """Pieces that no 16 bytes divide stay apart; the results do not know it."""
    hidden_size, num_heads, _ = sizes
    model = make(hidden_size=hidden_size, num_attention_heads=num_heads).to(dtype)
    assert_right(attentions(model)[0])


def test_shared_memory_stays_shared():
    model = make()
    expected = output(model)
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters()) and not is_joined(model)
    assert torch.allclose(output(model), expected)
    one = attentions(model)[0]
    process = torch.multiprocessing.get_context("fork").Process(target=_fill, args=(one,))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert (one.key.weight == 7.0).all() and not (one.query.weight == 7.0).any()
    model.to("cpu")
    assert one.key.weight.is_shared(), "what other processes see is not moved"


def _fill(one: BertSelfAttention) -> None:
    with torch.no_grad():
        one.key.weight.fill_(7.0)
