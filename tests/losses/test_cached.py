"""Backward by parts: beside that of the whole batch to the last bit, in one process and in two; what is in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import bert_fast
from bert_fast import losses
from tests.two_processes import run_two_processes


def encoder(dropout: float) -> bert_fast.BertModel:
    torch.manual_seed(3)
    config = bert_fast.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return bert_fast.BertModel(config, add_pooling_layer=False).train()


def batch(num_parts: int) -> list[Tensor]:
    """Parts of pairs: ids [3, 2, L], in each part of another length."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, 50, (3, 2, 4 + part), generator=generator) for part in range(num_parts)]


def step(model: torch.nn.Module, parts: list[Any], scale: Tensor, is_cached: bool, **options: Any) -> dict[str, Any]:
    """Loss, gradients, and what is drawn next."""

    def encode(part: Tensor) -> Tensor:
        return model(part.flatten(0, 1)).last_hidden_state.mean(1).view(len(part), 2, -1)

    def loss(embeddings: Tensor) -> Tensor:
        embeddings = torch.nn.functional.dropout(embeddings, 0.1)  # draws behind all parts
        return losses.in_batch_negatives(embeddings[:, 0], embeddings[:, 1], scale=scale, symmetric=True, **options)

    torch.manual_seed(11)
    if is_cached:
        value = losses.cached_loss(encode, parts, loss, no_sync=getattr(model, "no_sync", None))
        value.backward()
    else:
        value = loss(torch.cat([encode(part) for part in parts]))
        value.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), "scale": scale.grad, "next": torch.rand(3), **named}


def both(dropout: float, num_parts: int, **options: Any) -> list[dict[str, Any]]:
    found = []
    for is_cached in (False, True):
        scale = torch.tensor(20.0, requires_grad=True)
        found.append(step(encoder(dropout), batch(num_parts), scale, is_cached, **options))
    return found


def assert_same(found: list[dict[str, Any]]) -> None:
    whole, cached = found
    assert whole.keys() == cached.keys() and len(whole) > 30
    for name, value in whole.items():
        assert torch.equal(value, cached[name]), name


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_cached_gradients_are_those_of_the_whole_batch_to_the_last_bit(dropout: float, num_parts: int) -> None:
    assert_same(both(dropout, num_parts))


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(both(0.1, 3))


def test_backward_outside_of_autocast_encodes_within_it() -> None:
    """As a Trainer does it."""
    model, parts, found = encoder(0.1), batch(3), []

    def encode(part: Tensor) -> Tensor:
        return model(part.flatten(0, 1)).last_hidden_state.mean(1).view(len(part), 2, -1)

    def loss(embeddings: Tensor) -> Tensor:
        return losses.in_batch_negatives(embeddings[:, 0], embeddings[:, 1])

    for is_cached in (False, True):
        torch.manual_seed(2)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if is_cached:
                value = losses.cached_loss(encode, parts, loss)
            else:
                value = loss(torch.cat([encode(part) for part in parts]))
        value.backward()
        found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    assert len(found[0]) > 30
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def counted(exchanged: list[int], bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    exchanged.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def cached_and_whole(rank: int) -> dict[str, list[dict[str, Any]]]:
    """Of losses that gather; and of a model whose backward takes means over processes, which counts them."""
    found = {"gathered": both(0.1, 3, gather=True)}
    for num_parts in (1, 3):
        found[f"of {num_parts}"] = of_both = []
        for is_cached in (False, True):
            exchanged: list[int] = []
            model = DistributedDataParallel(encoder(0.1))

            model.register_comm_hook(exchanged, counted)
            parts = [part.roll(rank, 0) for part in batch(num_parts)]
            parts[0] = parts[0][: 3 - rank]
            of_both.append(step(model, parts, torch.tensor(20.0, requires_grad=True), is_cached))
            of_both[-1]["exchanged"] = torch.tensor(exchanged)
    return found


def test_cached_gradients_of_two_processes(tmp_path: Path) -> None:
    first, second = run_two_processes(cached_and_whole, tmp_path)
    for found in (first, second):
        for pair in found.values():
            assert_same(pair)
    for name in ("of 1", "of 3"):
        mine, others = first[name][1], second[name][1]
        assert not torch.equal(mine["loss"], others["loss"])
        for key in mine:
            assert torch.equal(mine[key], others[key]) or not key.startswith("module."), key


def test_cached_gradients_add_to_what_is_there() -> None:
    model, scale = encoder(0.0), torch.tensor(20.0, requires_grad=True)
    once = {name: t.clone() for name, t in step(model, batch(2), scale, True).items()}
    twice = step(model, batch(2), scale, True)
    for name, value in once.items():
        if name not in ("loss", "next"):
            torch.testing.assert_close(twice[name], 2 * value, msg=name)


def test_activations_of_one_part_at_a_time() -> None:
    """Tensors kept for backward: of one part, whatever their number; the last part is encoded once."""
    alive: set[int] = set()
    seen: list[tuple[bool, int, int]] = []  # of a call: whether it keeps tensors, those that others keep, its own
    model = encoder(0.1)

    class Kept:
        def __init__(self, t: Tensor) -> None:
            self.tensor = t
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    def encode(ids: Tensor) -> Tensor:
        before = len(alive)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            made = model(ids).last_hidden_state.mean(1)
        seen.append((torch.is_grad_enabled(), before, len(alive) - before))
        return made

    parts = [part[:, side] for part in batch(4) for side in (0, 1)]
    losses.cached_loss(encode, parts, lambda e: losses.in_batch_negatives(*e.chunk(2))).backward()
    kept = seen[-1][2]
    assert kept > 10 and not alive
    assert seen == [(False, 0, 0)] * 7 + [(True, 0, kept)] * 8


def test_gradients_are_scaled_and_without_gradients_there_is_a_value() -> None:
    model, parts = encoder(0.0), batch(3)

    def gradients(scale: float) -> list[Tensor]:
        model.zero_grad()
        value = losses.cached_loss(lambda part: model(part[:, 0]).last_hidden_state.mean(1), parts, lambda e: e.sum())
        (value * scale).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    for one, doubled in zip(gradients(1.0), gradients(2.0), strict=True):
        torch.testing.assert_close(doubled, 2 * one)
    with torch.no_grad():
        value = losses.cached_loss(lambda part: part[:, 0].sum(1).float(), parts, lambda e: e.sum())
    assert value == sum(part[:, 0].sum() for part in parts)


def test_what_is_drawn_between_the_passes_goes_on() -> None:
    model, drawn = encoder(0.1), []
    for _ in range(2):
        torch.manual_seed(5)
        value = losses.cached_loss(lambda part: model(part[:, 0]).last_hidden_state.mean(1), batch(3), torch.sum)
        drawn.append(torch.rand(2))
        value.backward()
        drawn.append(torch.rand(2))
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3]) and not torch.equal(*drawn[:2])


def test_bad_parts() -> None:
    with pytest.raises(ValueError, match="parts: expected at least one, got none"):
        losses.cached_loss(lambda part: part, [], lambda e: e.sum())
    weight = torch.ones(3, requires_grad=True)
    parts = [torch.ones(2, 3), torch.ones(2, 3)]
    with pytest.raises(ValueError, match=r"loss\(embeddings\): expected shape"):
        losses.cached_loss(lambda part: part * weight, parts, lambda e: e.sum(1))
    with pytest.raises(ValueError, match="expected a loss that depends on the embeddings"):
        losses.cached_loss(lambda part: part * weight, parts, lambda e: torch.zeros(()))
    sizes = iter((2, 2, 1))
    value = losses.cached_loss(lambda part: part[: next(sizes)] * weight, parts, lambda e: e.sum())
    with pytest.raises(RuntimeError, match=r"expected \[2, 3\] again from part 0, got \[1, 3\]"):
        value.backward()
