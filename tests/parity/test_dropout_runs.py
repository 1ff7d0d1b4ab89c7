"""Training with dropout on, run in different ways: the same masks, hence the same losses and parameters, to the bit.

A spy writes down what every op asks for: op, site, seed, probability, and the (row, position) of all tokens. Masks are
a pure function of these (tests of the ops), so runs that ask for the same draw the same. That holds for attention too:
the ordinals by which its keys are named follow from the tokens that were kept.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bert_fast
from bert_fast import backend
from bert_fast.reference.dropout import DropoutSite, dropout_site

LAYERS, STEPS = 2, 3
CONFIG = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=40,
    max_position_embeddings=20, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3,
)  # fmt: skip
LENGTHS = ([9, 4, 7], [3, 6, 1], [8, 8, 2])  # of each step's sequences

Draw = tuple[str, int, int, float, frozenset[tuple[int, int]]]


class Spy(TorchDispatchMode):
    """Counts what ops draw, forward and backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[Draw] = Counter()
        self.backward: Counter[Draw] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bert_fast":
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            if named.get("dropout_p", 0.0) > 0:
                self._count(func.__name__.split(".")[0], named)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, named: dict[str, Any]) -> None:
        coords = next(value for name, value in named.items() if name.startswith("coords"))
        tokens = frozenset((row, position) for row, position in coords.tolist())
        name, direction = op.removesuffix("_fwd").removesuffix("_bwd"), op[-3:]
        draw = (name, named["site"], int(named["seed"]), named["dropout_p"], tokens)
        (self.backward if direction == "bwd" else self.forward)[draw] += 1


@dataclass
class Run:
    """What a training run left behind."""

    losses: list[Tensor] = field(default_factory=list)
    spies: list[Spy] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def assert_same_bits(self, other: "Run", first_step: int = 0) -> None:
        """`other` may have begun at a later step."""
        assert len(self.losses) - first_step == len(other.losses) > 0
        for mine, theirs in zip(self.losses[first_step:], other.losses, strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            assert torch.equal(mine, theirs)

    def assert_same_masks(self, other: "Run", first_step: int = 0) -> None:
        for mine, theirs in zip(self.spies[first_step:], other.spies, strict=True):
            assert mine.forward.keys() == theirs.forward.keys() and mine.forward
            assert mine.backward.keys() == theirs.backward.keys() and mine.backward


def make_model() -> bert_fast.BertForMaskedLM:
    return bert_fast.BertForMaskedLM(bert_fast.BertConfig(**CONFIG)).train()


def batch(step: int, *, packed: bool) -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS[step])
    columns = int(lengths.max())
    ids = torch.randint(1, 50, (len(lengths), columns), generator=torch.Generator().manual_seed(step))
    mask = torch.arange(columns) < lengths[:, None]
    labels = torch.where(ids % 3 == 0, ids, -100)
    if not packed:
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask, labels, -100)}
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "input_ids": ids[mask], "labels": labels[mask], "cu_seqlens": cu_seqlens, "max_seqlen": columns,
    }  # fmt: skip


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, *, packed: bool = False, call: Any = None) -> Run:
    """Seeds are drawn from PyTorch's generator as it stands."""
    run = Run()
    for step in steps:
        optimizer.zero_grad()
        with Spy() as spy:
            loss = (call or model)(**batch(step, packed=packed)).loss
            loss.backward()
        optimizer.step()
        run.losses.append(loss.detach())
        run.spies.append(spy)
    run.parameters = [p.detach().clone() for p in model.parameters()]
    return run


def fresh(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make_model()
    torch.manual_seed(100 + seed)  # decides the masks alone
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_run(**options: Any) -> Run:
    return train(*fresh(), range(STEPS), **options)


@pytest.fixture(params=["torch", "reference"])
def name(request: pytest.FixtureRequest) -> Any:
    with backend.use_backend(request.param):
        yield request.param


def test_every_site_is_drawn_once_forward_and_backward(name: str) -> None:
    run = plain_run()
    layered = ("ATTENTION_PROBS", "ATTENTION_OUTPUT", "MLP_OUTPUT")
    sites = {dropout_site(DropoutSite[kind], layer) for kind in layered for layer in range(LAYERS)} | {
        dropout_site(DropoutSite.EMBEDDING)
    }
    last_layer = {dropout_site(DropoutSite[kind], LAYERS - 1) for kind in layered}
    seeds = set()
    for step, spy in enumerate(run.spies):
        assert {site for _, site, *_ in spy.forward} == sites
        # The backward of the op `dropout` is the op itself.
        assert all(count == 1 + (draw[0] == "dropout") for draw, count in spy.forward.items())
        kept = {(row, position) for row, length in enumerate(LENGTHS[step]) for position in range(length)}
        labelled = {(row, position) for row, position in (batch(step, packed=False)["labels"] >= 0).nonzero().tolist()}
        for _, site, *_, tokens in spy.forward:
            assert tokens == (labelled if site in last_layer else kept)  # of the last layer only labelled rows are read
        assert spy.backward.keys() == {draw for draw in spy.forward if draw[0] != "dropout"}
        seeds |= {seed for _, _, seed, *_ in spy.forward}
    assert len(seeds) == STEPS  # one seed a step


def test_a_run_repeats_and_another_seed_changes_it() -> None:
    run = plain_run()
    run.assert_same_bits(plain_run())
    other = train(*fresh(seed=1), range(STEPS))
    assert not torch.equal(run.losses[0], other.losses[0])
    assert not set(run.spies[0].forward) & set(other.spies[0].forward)


def test_packed_runs_draw_what_padded_runs_draw(name: str) -> None:
    padded, packed = plain_run(), plain_run(packed=True)
    padded.assert_same_masks(packed)
    padded.assert_same_bits(packed)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_recomputed_layers_draw_again_what_they_drew(every: int, packed: bool) -> None:
    plain = plain_run(packed=packed)
    model, optimizer = fresh()
    model.activation_checkpointing_enable({"use_reentrant": False}, every)
    recomputed = train(model, optimizer, range(STEPS), packed=packed)
    plain.assert_same_masks(recomputed)
    plain.assert_same_bits(recomputed)
    embedding = dropout_site(DropoutSite.EMBEDDING)
    drawn = {(site, count) for spy in recomputed.spies for (_, site, *_), count in spy.forward.items()}
    again = {site // 8 for site, count in drawn if count == 2 and site != embedding}
    assert again == set(range(0, LAYERS, every))  # these layers did run twice


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_resumed_run_draws_what_the_whole_one_drew(packed: bool, tmp_path: Path) -> None:
    whole = plain_run(packed=packed)
    model, optimizer = fresh()
    train(model, optimizer, range(1), packed=packed)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    torch.save(state, tmp_path / "state.pt")

    torch.manual_seed(12345)
    model = make_model()  # other parameters, another generator
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = torch.load(tmp_path / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"])
    resumed = train(model, optimizer, range(1, STEPS), packed=packed)
    whole.assert_same_masks(resumed, first_step=1)
    whole.assert_same_bits(resumed, first_step=1)


def test_without_the_state_of_the_generator_a_resumed_run_differs() -> None:
    whole = plain_run()
    model, optimizer = fresh()
    train(model, optimizer, range(1))
    torch.manual_seed(12345)
    resumed = train(model, optimizer, range(1, STEPS))
    assert not torch.equal(whole.losses[1], resumed.losses[0])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_compiled_runs_draw_what_eager_runs_draw(packed: bool) -> None:
    """One graph for all lengths. The spy sees no op inside of it: equal losses and gradients stand for equal masks."""
    torch._dynamo.reset()
    eager = losses_of(packed=packed, compiled=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = losses_of(packed=packed, compiled=True)
    for (loss, gradients), (other, others) in zip(eager, compiled, strict=True):
        assert torch.equal(loss, other)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    torch._dynamo.reset()


def losses_of(*, packed: bool, compiled: bool) -> list[tuple[Tensor, list[Tensor]]]:
    """Loss and gradients of every step, without a spy."""
    model, _ = fresh()
    call = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else model
    found = []
    for step in range(STEPS):
        model.zero_grad()
        loss = call(**batch(step, packed=packed)).loss
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    return found
