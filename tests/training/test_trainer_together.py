"""Two processes train as one does with twice the batch. accelerate shards (FSDP2) on GPUs only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bert_fast.testing.tolerances import RELATIVE
from tests.training.toy import toy_model
from tests.training.toy_process import start, train_together

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

COMMON: dict[str, Any] = dict(dropout=0.0, save_steps=5)
SCENARIOS: dict[str, dict[str, Any]] = {
    # changes for two processes: 16 examples a step
    "ddp": {},
    "ddp, accumulated, with workers": dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, dataloader_num_workers=1,
        dataloader_multiprocessing_context="fork",  # as under torchrun: here a server would import everything again
    ),
}  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    before = toy_model().state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        bound = RELATIVE["two_processes"] * max(1.0, value.abs().max().item())
        assert (value - two[name]).abs().max() <= bound, name
    assert sum(not torch.equal(before[name], value) for name, value in one.items()) > 20, "nothing was trained"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    process = start(path, **COMMON, per_device_train_batch_size=16, eval_strategy="steps", eval_steps=6)
    process.join()
    assert process.exitcode == 0
    return path


def evaluations(run: Path) -> list[tuple[float, float]]:
    history = json.loads((run / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    return [(entry["eval_loss"], entry["eval_accuracy"]) for entry in history if "eval_loss" in entry]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_are_one_with_twice_the_batch(alone: Path, tmp_path: Path, scenario: str) -> None:
    settings = COMMON | {"eval_strategy": "steps", "eval_steps": 6} | SCENARIOS[scenario]
    assert train_together(tmp_path, 2, **settings) == [0, 0]
    assert_close(weights(alone), weights(tmp_path))
    found, expected = evaluations(tmp_path), evaluations(alone)
    assert len(found) == len(expected) == 2
    for (loss, accuracy), (other_loss, other_accuracy) in zip(found, expected, strict=True):
        assert abs(loss - other_loss) <= RELATIVE["two_processes"] and accuracy == other_accuracy


def test_a_shared_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    arguments: dict[str, Any] = dict(save_steps=4, dropout=0.1)
    assert train_together(tmp_path / "straight", 2, **arguments) == [0, 0]
    run = tmp_path / "cut off"
    shutil.copytree(tmp_path / "straight", run)  # as if both were killed after step 8
    shutil.rmtree(run / "checkpoint-12")
    shutil.rmtree(run / "model")
    assert train_together(run, 2, **arguments) == [0, 0]
    first, second = weights(tmp_path / "straight"), weights(run)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "cut off"
    common = dict(dropout=0.0, save_steps=4, per_device_train_batch_size=4)
    process = start(straight, gradient_accumulation_steps=4, **common)
    process.join()
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoint-12")
    assert train_together(run, 2, gradient_accumulation_steps=2, **common) == [0, 0]
    assert_close(weights(straight), weights(run))


def test_processes_draw_different_dropout(tmp_path: Path) -> None:
    # The same examples in both processes and dropout on: were the masks the same, so would be the gradients.
    results = []
    for count, size in ((1, 8), (2, 4)):
        run = tmp_path / str(count)
        settings = dict(save_steps=100, max_steps=2, warmup_steps=0, per_device_train_batch_size=size)
        assert train_together(run, count, **settings) == [0] * count
        results.append(torch.cat([value.flatten() for value in weights(run).values()]))
    assert not torch.equal(*results)


def test_a_process_that_is_gone_ends_the_other(tmp_path: Path) -> None:
    exit_codes = train_together(tmp_path, 2, **COMMON, dies_at=3)
    assert exit_codes[1] == 9
    assert exit_codes[0] not in (0, None), "it must not wait for ever"
