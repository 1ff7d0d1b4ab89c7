"""What a run is besides its weights, how it is saved, and what it must agree on to go on."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bert_fast.data.batches import source_digest
from bert_fast.data.digests import data_digest
from bert_fast.data.token_store import tokenizer_hash
from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.models.checkpoint import load_checkpoint, load_into
from bert_fast.models.checkpoint_writer import save_checkpoint
from bert_fast.tokenization import Tokenizer
from bert_fast.training.checkpoints import OPTIMIZER, RANDOM, load_data, save_data
from bert_fast.training.config import TrainingConfig
from bert_fast.training.distributed import Processes
from bert_fast.training.task import Task

__all__ = [
    "agreement",
    "check_agreement",
    "check_processes",
    "load_weights",
    "restore_run",
    "run_state",
    "seed_generators",
    "whole_model",
]

# Fields of a configuration that may change while a run is interrupted: they do not change what it computes (graphs: to
# rounding).
_FREE = ("output_dir", "log_every", "save_every", "keep_checkpoints", "num_workers", "eval_batch_tokens", "graphs")
_NOT_IN_EARLIER_VERSIONS = ("labels", "digests")
_SHOWN_DIGITS = 32  # of a digest: 128 bits are enough to tell, and can be read


def agreement(config: TrainingConfig, task: Task, model: Any, tokenizer: Any, processes: Processes) -> dict[str, Any]:
    """What decides the course of a run, as plain values: two runs that agree on it compute the same."""
    assert task.train is not None
    lengths = task.train.lengths(0)
    training = {name: value for name, value in config.as_dict().items() if name not in _FREE}
    agreed = {
        "task": task.name,
        "training": training,
        "model": {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")},
        "data": {"examples": len(lengths), "tokens": int(lengths.sum())},
        "labels": task.model_config().get("id2label"),
        "digests": {
            "train": source_digest(task.train)[:_SHOWN_DIGITS],
            "valid": None if task.valid is None else source_digest(task.valid)[:_SHOWN_DIGITS],
            "tokenizer": None if tokenizer is None else _tokenizer_digest(tokenizer)[:_SHOWN_DIGITS],
        },
        "processes": processes.count,
    }
    return json.loads(json.dumps(agreed, default=str))  # as it comes back from a file


def check_agreement(saved: Mapping[str, Any], present: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError that names everything on which a checkpoint and this run do not agree.

    The number of processes may be another if the micro-batches of a step are as many as before: which examples a step
    takes is a function of their numbers alone.
    """
    later = [name for name in _NOT_IN_EARLIER_VERSIONS if name not in saved]
    then, now = _with_share(saved), _with_share({name: one for name, one in present.items() if name not in later})
    differences = _differences(now, then)
    shares = now.get("batches a step"), then.get("batches a step")
    if differences and shares[0] != shares[1] and saved["processes"] != present["processes"]:
        wanted, rest = divmod(shares[1], present["processes"])
        differences += f" (with {present['processes']} processes, gradient_accumulation " + (
            f"{wanted} makes them as many)" if not rest else "cannot make them as many)"
        )
    if differences:
        raise CheckpointError(
            f"{path}: was made by another run: {differences}. Go on with the same settings, or begin anew in another "
            "output_dir"
        )


def _with_share(agreed: Mapping[str, Any]) -> dict[str, Any]:
    """What was agreed on, with the micro-batches of a step in place of processes and the accumulation of each."""
    training = dict(agreed.get("training", {}))
    accumulation, processes = training.pop("gradient_accumulation", None), agreed.get("processes")
    if not isinstance(accumulation, int) or not isinstance(processes, int):
        return dict(agreed)  # of a damaged or foreign file: compared as it is
    rest = {name: value for name, value in agreed.items() if name != "processes"}
    return rest | {"training": training, "batches a step": accumulation * processes}


def _tokenizer_digest(tokenizer: Any) -> str:
    """Of what decides the ids of a text; of other people's tokenizers of their vocabulary alone."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer_hash(tokenizer)
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return data_digest(sorted(vocabulary.items()))


def check_processes(agreed: Mapping[str, Any], processes: Processes) -> None:
    """Raises TrainingError if the processes of a run have not the same settings, model and data."""
    for rank, theirs in enumerate(processes.gathered(agreed)):
        differences = _differences(agreed, theirs)
        if differences:
            raise TrainingError(f"process {rank} trains another run than process {processes.rank}: {differences}")


def whole_model(model: nn.Module, processes: Processes) -> nn.Module:
    """A model whose parameters are all there, to be saved by the main process: of a sharded one a gathered copy.

    Every process calls it.
    """
    if not processes.is_sharded:
        return model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = type(model)(model.config)
    if processes.is_main:
        whole.load_state_dict(weights)
    return whole


def load_weights(directory: Path, model: nn.Module, processes: Processes) -> None:
    """Puts the weights of a checkpoint into a model, sharded or not.

    Raises: CheckpointError: they are damaged, or of a model of other sizes.
    """
    if not processes.is_sharded:
        report = load_into(model, load_checkpoint(directory), ignore_mismatched_sizes=False, source=directory)
        if report.missing:
            raise CheckpointError(f"{directory}: expected all parameters of the model, without {report.missing[:3]}")
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole = type(model)(model.config)
    load_into(whole, load_checkpoint(directory), ignore_mismatched_sizes=False, source=directory)
    set_model_state_dict(model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))


def run_state(model: nn.Module, optimizer: Any, processes: Processes) -> Callable[[Path], dict[str, str]]:
    """What writes all that `restore_run` reads into a directory, for the main process.

    It returns the digests of the files that it hashed while it wrote them, for `CheckpointFolder.write`.

    Every process calls this; what is shared among them is gathered here, so that nothing but files is left to do.
    """
    whole = whole_model(model, processes)
    state = _optimizer_state(model, optimizer, processes)
    scaler = processes.accelerator.scaler
    generators = processes.gathered(_random_states(processes.device))

    def write(directory: Path) -> dict[str, str]:
        save_checkpoint(directory, whole, whole.config)
        optimizers = {"optimizer": state, "scaler": scaler and scaler.state_dict()}
        return {
            OPTIMIZER: save_data(directory / OPTIMIZER, optimizers),
            RANDOM: save_data(directory / RANDOM, generators),
        }

    return write


def restore_run(directory: Path, model: nn.Module, optimizer: Any, processes: Processes, num_saved: int) -> None:
    """Gives model, optimizer, loss scaler and random number generators the state that `run_state` found.

    num_saved: processes of which generators were saved; later ones keep those that they were seeded with.

    Raises: CheckpointError: something is missing, damaged, or of another run.
    """
    load_weights(directory, model, processes)
    saved, generators = load_data(directory / OPTIMIZER), load_data(directory / RANDOM)
    try:
        if processes.is_sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(model, optimizer.optimizer, saved["optimizer"], options=options)
        else:
            optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"] is not None and processes.accelerator.scaler is not None:
            processes.accelerator.scaler.load_state_dict(saved["scaler"])
        if processes.rank < num_saved:
            _set_random_states(generators[processes.rank], processes.device)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: does not fit this run: {error}") from error


def seed_generators(seed: int) -> None:
    """Seeds the generators that `run_state` keeps: PyTorch's, from which dropout draws, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _optimizer_state(model: nn.Module, optimizer: Any, processes: Processes) -> Any:
    if not processes.is_sharded:
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer.optimizer, options=options)


def _random_states(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"], device)


def _differences(present: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name} is {_shown(now)} here and {_shown(then)} there"
        for name, now, then in _pairs(present, saved, "")
        if now != then
    )


def _pairs(present: Any, saved: Any, name: str) -> list[tuple[str, Any, Any]]:
    """(dotted name, value here, value there) of all leaves of two nested mappings."""
    if isinstance(present, Mapping) and isinstance(saved, Mapping):
        keys = [*present, *(key for key in saved if key not in present)]
        prefix = f"{name}." if name else ""
        return [pair for key in keys for pair in _pairs(present.get(key), saved.get(key), f"{prefix}{key}")]
    return [(name, present, saved)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
