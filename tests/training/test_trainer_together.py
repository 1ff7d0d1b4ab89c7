"""Two processes train as one does with twice the batch."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.training.checkpoints import CheckpointFolder
from bert_fast.training.training_state import check_agreement, check_processes
from tests.training.toy import toy_model
from tests.training.toy_process import start, toy_trainer, train_together

pytest.importorskip("accelerate")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

COMMON = dict(dropout=0.0, save_every=5)
SCENARIOS = {
    # changes for two processes: 16 examples a step
    "ddp": {},
    "ddp, accumulated, with workers": dict(batch_size=4, gradient_accumulation=2, num_workers=1),
    "fsdp2, accumulated": dict(sharding="fsdp2", batch_size=4, gradient_accumulation=2),
}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    process = start(path, **COMMON, batch_size=16)
    process.join()
    assert process.exitcode == 0
    return path


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_are_one_with_twice_the_batch(alone, tmp_path, scenario) -> None:
    assert train_together(tmp_path, 2, **COMMON, **SCENARIOS[scenario]) == [0, 0]
    one, two, before = weights(alone), weights(tmp_path), toy_model().state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        bound = RELATIVE["two_processes"] * max(1.0, value.abs().max().item())
        assert (value - two[name]).abs().max() <= bound, name
    assert sum(not torch.equal(before[name], value) for name, value in one.items()) > 20, "nothing was trained"
    for run in (alone, tmp_path):
        assert (run / "metrics.jsonl").read_text().count('"kind": "evaluation"') == 3


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_shared_run_goes_on_with_the_same_bits(tmp_path, sharding) -> None:
    arguments = dict(sharding=sharding, save_every=4, dropout=0.1)
    assert train_together(tmp_path / "straight", 2, **arguments) == [0, 0]
    run = tmp_path / "cut off"
    # As if both were killed after step 4: what was written later is not there.
    shutil.copytree(tmp_path / "straight", run)
    folder = CheckpointFolder(run / "checkpoints", 2)
    for step in folder.steps():
        if step > 8:
            shutil.rmtree(folder.directory(step))
    shutil.rmtree(run / "model")
    assert train_together(run, 2, **arguments) == [0, 0]
    first, second = weights(tmp_path / "straight"), weights(run)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_number_of_processes_goes_on(tmp_path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "cut off"
    alone = dict(dropout=0.0, save_every=4, batch_size=4)
    toy_trainer(straight, gradient_accumulation=4, **alone).train()
    shutil.copytree(straight, run)
    folder = CheckpointFolder(run / "checkpoints", 2)
    for step in folder.steps():
        if step > 8:
            shutil.rmtree(folder.directory(step))
    shutil.rmtree(run / "model")
    with pytest.raises(CheckpointError, match="batches a step is 3 here and 4 there"):
        toy_trainer(run, gradient_accumulation=3, **alone).train()
    assert train_together(run, 2, gradient_accumulation=2, **alone) == [0, 0]
    first, second = weights(straight), weights(run)
    for name, value in first.items():
        bound = RELATIVE["two_processes"] * max(1.0, value.abs().max().item())
        assert (value - second[name]).abs().max() <= bound, name
    told = (run / "metrics.jsonl").read_text()
    assert "2 processes in place of 1: the same examples" in told
    assert [line["step"] for line in map(json.loads, told.splitlines()) if line["kind"] == "step"] == [12]


def test_how_another_number_of_processes_may_go_on_is_said(tmp_path) -> None:
    def agreed(processes: int, accumulation: int) -> dict:
        return {"processes": processes, "training": {"gradient_accumulation": accumulation, "seed": 0}}

    check_agreement(agreed(2, 4), agreed(8, 1), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"8 there \(with 4 processes, gradient_accumulation 2 makes them as many"
    ):
        check_agreement(agreed(2, 4), agreed(4, 4), tmp_path)
    with pytest.raises(CheckpointError, match=r"with 3 processes, gradient_accumulation cannot make them as many"):
        check_agreement(agreed(2, 4), agreed(3, 3), tmp_path)
    with pytest.raises(CheckpointError, match=r"training\.seed is 0 here and 1 there. Go on"):
        check_agreement({**agreed(2, 4), "training": {"gradient_accumulation": 4, "seed": 1}}, agreed(2, 4), tmp_path)


def test_processes_draw_different_dropout(tmp_path) -> None:
    # The same examples in both processes and dropout on: were the masks the same, so would be the gradients.
    results = []
    for count, size in ((1, 8), (2, 4)):
        run = tmp_path / str(count)
        assert train_together(run, count, save_every=100, steps=2, warmup=0, batch_size=size) == [0] * count
        results.append(torch.cat([value.flatten() for value in weights(run).values()]))
    assert not torch.equal(*results)


def test_a_process_that_is_gone_ends_the_other(tmp_path) -> None:
    exit_codes = train_together(tmp_path, 2, **COMMON, dies_at=3)
    assert exit_codes[1] == 9
    assert exit_codes[0] not in (0, None), "it must not wait for ever"


def test_processes_of_different_settings_do_not_train(tmp_path) -> None:
    assert train_together(tmp_path, 2, differs=True) == [1, 1]
    assert not (tmp_path / "checkpoints").exists()


def test_what_processes_do_not_agree_on_is_named() -> None:
    class Two:
        rank = 0

        def gathered(self, value):
            return [value, {"training": {"learning_rate": 0.002, "seed": 0}}]

    with pytest.raises(
        TrainingError, match=r"process 1 trains another .* 0: training\.learning_rate is 0\.001 here and"
    ):
        check_processes({"training": {"learning_rate": 0.001, "seed": 0}}, Two())
    check_processes({"training": {"learning_rate": 0.002, "seed": 0}}, Two())
