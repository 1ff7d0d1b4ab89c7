"""A device runs out of memory in the middle of an op: the error says where, is caught as before, and nothing breaks."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import bert_fast
from bert_fast import BertConfig, BertModel, ops
from bert_fast.optim import AdamW
from tests.ops.test_every_op import SAMPLES, Sample, leaf, record, run

MESSAGE = "CUDA out of memory. Tried to allocate 80.00 GiB"  # as PyTorch's begins
DIRECTIONS = {"forward": ("_fwd", "_in_place", "_step", "global_norm"), "backward": ("_bwd",)}


def fail(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


@contextmanager
def no_memory_in(op: str, direction: str) -> Iterator[None]:
    """Back-end `torch` has no memory for this op."""
    module = importlib.import_module(f"bert_fast.torch.{op}")
    names = [name for name in dir(module) if name.endswith(DIRECTIONS[direction])]
    assert names
    with mock.patch.multiple(module, **dict.fromkeys(names, fail)), bert_fast.backend.use_backend("torch"):
        yield


def error_of(sample: Sample) -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(sample.function, sample.make(5))
    return caught.value


WITHOUT_BACKWARD = {"optimizer: adamw", "optimizer: lamb", "linear_int8", "dropout"}  # its own is of the gradient
CASES = [
    (name, direction)
    for name in SAMPLES
    for direction in DIRECTIONS
    if not (direction == "backward" and name in WITHOUT_BACKWARD)
]


@pytest.mark.parametrize(("name", "direction"), CASES)
def test_op_and_device_are_named(name: str, direction: str) -> None:
    """Once, with the name that the op is registered by, before PyTorch's own words."""
    sample = SAMPLES[name]
    reached = [op for op in record(sample) if op.endswith("_bwd") == (direction == "backward")]
    with no_memory_in(name.split(":")[0], direction):
        error = error_of(sample)
    assert error.args in [(f"{op} on cpu: {MESSAGE}",) for op in reached]
    run(sample.function, sample.make(5))  # and goes on


def test_calls_through_the_dispatcher_are_named_once() -> None:
    with no_memory_in("layer_norm", "forward"), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ops.bert_fast.layer_norm_fwd(leaf(3, 8).detach(), leaf(8).detach(), leaf(8).detach(), 1e-12, "torch")
    assert caught.value.args == (f"layer_norm_fwd on cpu: {MESSAGE}",)
    x = leaf(3, 8)
    with (
        no_memory_in("layer_norm", "backward"),
        torch.profiler.profile(),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        ops.layer_norm(x, leaf(8), leaf(8)).sum().backward()
    assert caught.value.args == (f"layer_norm_bwd on cpu: {MESSAGE}",)


def test_the_norm_of_gradients_is_named() -> None:
    with no_memory_in("optimizer", "forward"), pytest.raises(torch.OutOfMemoryError) as caught:
        ops.optimizer.global_norm([leaf(3)])
    assert caught.value.args == (f"global_norm on cpu: {MESSAGE}",)


def test_accelerate_finds_a_batch_size() -> None:
    """`find_executable_batch_size` knows the error by its class and words, and tries smaller batches."""
    utils = pytest.importorskip("accelerate.utils")
    from bert_fast.torch import layer_norm

    tried = []

    def little_memory(a: object) -> object:
        return fail() if len(a.x) > 3 else forward(a)  # type: ignore[attr-defined]

    forward = layer_norm.layer_norm_fwd

    @utils.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        ops.layer_norm(leaf(batch_size, 8), leaf(8), leaf(8)).sum().backward()
        return batch_size

    with mock.patch.object(layer_norm, "layer_norm_fwd", little_memory), bert_fast.backend.use_backend("torch"):
        assert train() == tried[-1] <= 3
    assert tried[0] == 8 and sorted(tried, reverse=True) == tried


@pytest.mark.parametrize("op", ["encoder_layer", "attention", "embedding"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_step_is_made_again_bit_for_bit(op: str, direction: str) -> None:
    """What failed half way leaves nothing behind: with the same seed, the step is the one that never failed."""
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
    )  # fmt: skip
    input_ids = torch.arange(30).view(3, 10)

    def trained(fails: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = BertModel(config).train()
        for module in model.encoder.modules() if op != "encoder_layer" else ():
            module.register_forward_hook(lambda *_: None)  # then a layer goes op by op
        optimizer = AdamW(model.parameters(), lr=1e-2)

        def step() -> None:
            torch.manual_seed(2)
            optimizer.zero_grad()
            model(input_ids=input_ids).last_hidden_state.square().sum().backward()
            optimizer.step()

        step()
        if fails:
            with no_memory_in(op, direction), pytest.raises(torch.OutOfMemoryError, match=f"^{op}"):
                step()
        step()
        return list(model.parameters())

    with bert_fast.backend.use_backend("torch"):
        assert all(map(torch.equal, trained(fails=False), trained(fails=True)))
