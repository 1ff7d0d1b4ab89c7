"""An encoder's layers, replayed: outputs and gradients of the calls without graphs, within any loop."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast import graphs
from bert_fast.errors import BackendError, DerivativeError
from tests import recorded_graph
from tests.recorded_graph import RecordedGraph

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=12,
)  # fmt: skip
SMALL, LARGE = graphs.Budget(max_tokens=16, max_sequences=3, max_seqlen=8), graphs.Budget(32, 5, 12)
BATCHES = ((3, 8), (8, 8), (1,), (12, 2, 5, 1), (2, 2, 2), (12, 12, 8))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU."""
    recorded_graph.install(monkeypatch)
    real = graphs.EncoderGraphs.__init__

    def init(self: graphs.EncoderGraphs, budgets: Any, *, device: Any = "cpu") -> None:
        real(self, budgets, device=device)

    monkeypatch.setattr(graphs.EncoderGraphs, "__init__", init)


@pytest.fixture(params=["own", "fused"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A model with or without graphs, and the same weights."""

    def make(name: str = "BertModel", budgets: Any = None, **config: Any) -> Any:
        torch.manual_seed(0)
        if request.param == "fused":
            transformers = pytest.importorskip("transformers")
            model = getattr(transformers, name)(transformers.BertConfig(**SIZES, **config))
            bert_fast.fuse(model, graphs=budgets)
            return model.train()
        model = getattr(bert_fast, name)(bert_fast.BertConfig(**SIZES, **config)).train()
        if budgets is not None:
            encoder_of(model).graphs = graphs.EncoderGraphs(budgets)
        return model

    return make


def encoder_of(model: Any) -> Any:
    return next(one for one in model.modules() if hasattr(one, "run_layers"))


def batch_of(*lengths: int) -> dict[str, Tensor]:
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(sum(lengths))
    words = torch.randint(5, 40, keep.shape, generator=generator) * keep
    return {"input_ids": words, "attention_mask": keep.long()}


def hidden_of(model: Any, lengths: tuple[int, ...], seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    return model(**batch_of(*lengths))[0]


def gradients_of(model: Any) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def are_close(ours: Any, theirs: Any, what: Any = "") -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}")


def trained(model: Any, lengths: tuple[int, ...], seed: int = 3) -> Tensor:
    """One forward and backward pass with a random gradient; the hidden states."""
    y = hidden_of(model, lengths, seed)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    y.backward(upstream)
    return y.detach()


def test_layers_are_replayed_with_their_dropout(make: Callable[..., Any]) -> None:
    plain, replayed = make(), make(budgets=[LARGE, SMALL])
    for seed, lengths in enumerate((*BATCHES, *BATCHES)):
        expected = trained(plain, lengths, seed)
        are_close(trained(replayed, lengths, seed), expected, lengths)
        are_close(gradients_of(replayed), gradients_of(plain), lengths)
        plain.zero_grad()
        replayed.zero_grad()
    assert len(RecordedGraph.all) == 4, "forward and backward of two budgets"
    assert RecordedGraph.num_replays == 4 * len(BATCHES)


def test_gradients_add_up_and_stay(make: Callable[..., Any]) -> None:
    """What a replay returned is not overwritten by the next one."""
    plain, replayed = make(), make(budgets=[SMALL])
    for lengths in BATCHES[:3] * 2:
        trained(plain, lengths)
        trained(replayed, lengths)
    are_close(gradients_of(replayed), gradients_of(plain))
    kept, values = zip(*((p.grad, p.grad.clone()) for p in replayed.parameters() if p.grad is not None), strict=True)
    y = trained(replayed, (2, 2))
    before = y.clone()
    replayed.zero_grad()
    trained(replayed, (4, 1), seed=9)
    assert torch.equal(y, before)
    del kept, values


def test_evaluation_has_graphs_of_its_own(make: Callable[..., Any]) -> None:
    plain, replayed = make(), make(budgets=[SMALL])
    for _ in range(2):
        are_close(trained(replayed, (3, 8)), trained(plain, (3, 8)))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                are_close(hidden_of(replayed.eval(), (3, 8)), hidden_of(plain.eval(), (3, 8)))
                are_close(hidden_of(replayed.train(), (4, 4)), hidden_of(plain.train(), (4, 4)))
    assert all(torch.isfinite(p.grad).all() for p in replayed.parameters() if p.grad is not None)


HEADS = {
    "BertForSequenceClassification": lambda batch: {"labels": torch.arange(len(batch["input_ids"])) % 2},
    "BertForTokenClassification": lambda batch: {
        "labels": (batch["input_ids"] % 2).masked_fill(batch["attention_mask"] == 0, -100)
    },
    "BertForMaskedLM": lambda batch: {
        "labels": batch["input_ids"].masked_fill((torch.arange(batch["input_ids"].shape[1]) % 3 != 1), -100)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_heads_learn_the_same(make: Callable[..., Any], name: str) -> None:
    plain, replayed = make(name), make(name, budgets=[SMALL, LARGE])
    for lengths in BATCHES:
        batch = batch_of(*lengths)
        for model in (plain, replayed):
            torch.manual_seed(1)
            model(**batch, **HEADS[name](batch)).loss.backward()
    are_close(gradients_of(replayed), gradients_of(plain))
    assert RecordedGraph.num_replays == 2 * len(BATCHES)


def test_steps_of_an_optimizer_are_followed(make: Callable[..., Any]) -> None:
    """Parameters that are written in place stay where they are; those that move are captured anew."""
    losses = []
    for model in (make(), make(budgets=[SMALL])):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(6):
            if step == 3:
                with torch.no_grad():
                    for p in model.parameters():
                        p.data = p.data.clone()
            seen.append(trained(model, BATCHES[step % 3]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.stack(seen))
    are_close(losses[1], losses[0])
    assert len(RecordedGraph.all) == 4


def test_frozen_parameters_get_no_gradient(make: Callable[..., Any]) -> None:
    plain, replayed = make(), make(budgets=[SMALL])
    for freeze in (("embeddings", "layer.0"), ("query",), ("encoder",), ()):
        for model in (plain, replayed):
            model.zero_grad()
            for name, p in model.named_parameters():
                p.requires_grad_(not any(word in name for word in freeze))
            trained(model, (3, 8))
        are_close(gradients_of(replayed), gradients_of(plain), freeze)


def test_autocast_is_another_form(make: Callable[..., Any]) -> None:
    plain, replayed = make(), make(budgets=[SMALL])
    for model in (plain, replayed):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = hidden_of(model, (3, 8))
            y.float().square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(
        (p.grad for p in plain.pooler.parameters() if p.grad is not None),
        (p.grad for p in replayed.pooler.parameters() if p.grad is not None), strict=True,
    ))  # fmt: skip
    for name, gradient in gradients_of(replayed).items():
        theirs = gradients_of(plain)[name]
        if theirs is not None:
            assert gradient is not None and gradient.dtype == theirs.dtype
            assert (gradient - theirs).norm() <= 2**-6 * theirs.norm(), name


def test_two_forward_passes_before_one_backward_pass(make: Callable[..., Any]) -> None:
    """As where queries and documents are encoded one after another."""
    plain, replayed = make(), make(budgets=[SMALL])
    for model in (plain, replayed):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                a, b = hidden_of(model, (3, 8), 1), hidden_of(model, (5, 4), 2)
            (a[:, 0] * b[:, 0]).sum().backward()
            told = [str(one.message) for one in caught if "without graphs" in str(one.message)]
            assert len(told) <= 1
    are_close(gradients_of(replayed), gradients_of(plain))
    assert RecordedGraph.num_replays == 4


def test_a_forward_pass_that_is_given_up_blocks_nothing(make: Callable[..., Any]) -> None:
    replayed = make(budgets=[SMALL])
    for _ in range(3):
        hidden_of(replayed, (3, 8))
        gc.collect()
    assert RecordedGraph.num_replays == 3


def test_a_second_backward_pass_of_what_is_overwritten_is_an_error(make: Callable[..., Any]) -> None:
    replayed = make(budgets=[SMALL])
    y = hidden_of(replayed, (3, 8))
    y.sum().backward(retain_graph=True)
    trained(replayed, (3, 8))
    with pytest.raises(DerivativeError, match="expected the backward pass of the last forward pass"):
        y.sum().backward()


def test_a_batch_that_fits_nowhere_runs_as_it_is(make: Callable[..., Any]) -> None:
    plain, replayed = make(), make(budgets=[SMALL])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lengths in ((9, 3), (2, 2, 2, 2), (8, 8, 1)):
            are_close(trained(replayed, lengths), trained(plain, lengths))
    assert len([one for one in caught if "no budget" in str(one.message)]) == 1
    are_close(gradients_of(replayed), gradients_of(plain))
    assert not RecordedGraph.all


def hooks(model: Any) -> None:
    encoder_of(model).layer[1].register_forward_hook(lambda module, given, made: made * 2)


def replaced(model: Any) -> None:
    layer = encoder_of(model).layer[0]
    own = layer.forward
    layer.forward = lambda *given, **named: own(*given, **named) * 2


LOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": hooks,
    "forward of its own": replaced,
    "checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_layers_that_are_looked_into_run_as_they_are(make: Callable[..., Any], look: Callable[[Any], Any]) -> None:
    plain, replayed = make(), make(budgets=[SMALL])
    trained(replayed, (3, 8))
    replays = RecordedGraph.num_replays
    for model in (plain, replayed):
        look(model)
        model.zero_grad()
    are_close(trained(replayed, (3, 8)), trained(plain, (3, 8)))
    are_close(gradients_of(replayed), gradients_of(plain))
    assert RecordedGraph.num_replays == replays


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_what_is_to_be_seen_is_not_replayed(make: Callable[..., Any], flag: str) -> None:
    replayed = (
        make(budgets=[SMALL], attn_implementation="eager") if flag == "output_attentions" else make(budgets=[SMALL])
    )
    replayed(**batch_of(3, 8), **{flag: True})
    assert not RecordedGraph.all


def test_copies_and_pickles_begin_without_graphs(make: Callable[..., Any]) -> None:
    replayed = make(budgets=[SMALL, LARGE])
    expected = trained(replayed, (3, 8))
    for other in (copy.deepcopy(replayed), pickle.loads(pickle.dumps(replayed))):
        assert encoder_of(other).graphs is not encoder_of(replayed).graphs
        assert encoder_of(other).graphs.budgets == [SMALL, LARGE] and not encoder_of(other).graphs._captured
        are_close(trained(other, (3, 8)), expected)
    assert len(RecordedGraph.all) == 6


def test_four_forms_are_kept(make: Callable[..., Any]) -> None:
    replayed = make(budgets=[SMALL])
    for _ in range(6):
        with torch.no_grad():
            for p in encoder_of(replayed).parameters():
                p.data = p.data.clone()
            hidden_of(replayed, (3, 8))
    assert 1 <= len(encoder_of(replayed).graphs._captured) <= 4


def test_fuse_and_unfuse() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    for wrong, error, message in (
        ([], ValueError, r"graphs: expected at least one Budget, got \[\]"),
        ([3], ValueError, r"graphs: expected at least one Budget, got \[3\]"),
    ):
        with pytest.raises(error, match=message):
            bert_fast.fuse(model, graphs=wrong)
        assert type(model) is transformers.BertModel, "nothing is changed"
    bert_fast.fuse(model, graphs=[SMALL])
    assert encoder_of(model).graphs.budgets == [SMALL]
    bert_fast.fuse(model)
    assert encoder_of(model).graphs.budgets == [SMALL], "as it was"
    bert_fast.fuse(model, graphs=[LARGE])
    assert encoder_of(model).graphs.budgets == [LARGE]
    encoder = encoder_of(model)
    bert_fast.unfuse(model)
    assert "graphs" not in vars(encoder)


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(BackendError, match=r"graphs: expected a CUDA device \(graphs are CUDA's\), got cpu"):
        graphs.EncoderGraphs([SMALL], device="cpu")


def test_what_cannot_be_captured_is_named(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = make(budgets=[SMALL])

    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.raises(BackendError, match=r"graphs: the layers could not be captured for Budget\(max_tokens=16"):
        hidden_of(replayed, (3, 8))


class _Around(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(16, 2)

    def forward(self, **batch: Any) -> Tensor:
        return self.head(self.model(**batch)[0][:, 0])


def test_around_a_model(make: Callable[..., Any]) -> None:
    outputs = []
    for model in (make(), make(budgets=[SMALL])):
        torch.manual_seed(2)
        around = _Around(model)
        torch.manual_seed(3)
        around(**batch_of(3, 8)).square().sum().backward()
        outputs.append(gradients_of(around))
    are_close(outputs[1], outputs[0])


def test_families() -> None:
    """Of every family that is not BERT: outputs, gradients and dropout, with and without graphs."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from tests.huggingface.families import CONFIG, ROTARY, configuration

    for prefix, options in CONFIG.items():
        models = []
        for budgets in (None, [LARGE, SMALL]):
            torch.manual_seed(0)
            cls = getattr(transformers, f"{prefix}Model")
            sizes = {**SIZES, "max_position_embeddings": 16}
            model = cls(configuration(cls, **sizes, **options))
            models.append(bert_fast.fuse(model, graphs=budgets).train())
        plain, replayed = models
        before = RecordedGraph.num_replays
        for seed, lengths in enumerate(((3, 8), (12, 2, 5, 1), (3, 8))):
            are_close(trained(replayed, lengths, seed), trained(plain, lengths, seed), (prefix, lengths))
            are_close(gradients_of(replayed), gradients_of(plain), (prefix, lengths))
        # No graph holds a bias or embeddings that layers share, or positions that turn queries and keys.
        wanted = 0 if prefix in ("MPNet", "DebertaV2", "RoFormer", *ROTARY) else 6
        assert RecordedGraph.num_replays - before == wanted, f"{prefix}: forward and backward of three batches"
