"""From settings to what a `Trainer` takes: tokenizer, task and model.

A model starts from a size by its name, a configuration, or a checkpoint whose head may be another one.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_fast import tokenization
from bert_fast.checks import check_choice
from bert_fast.errors import CheckpointError, SourceError
from bert_fast.models import BertConfig, BertPreTrainedModel
from bert_fast.models.checkpoint import list_names, load_checkpoint, load_into
from bert_fast.models.shapes import check_sizes
from bert_fast.tokenization import Tokenizer
from bert_fast.training.checkpoints import STATE, WEIGHTS, check_files
from bert_fast.training.recipes.settings import ModelSettings, Settings, SettingsError
from bert_fast.training.task import Task
from bert_fast.training.tasks.base import OnMain

__all__ = [
    "SIZES",
    "Parts",
    "build",
    "load_model",
    "load_tokenizer",
    "make_config",
    "new_model",
    "settings_at_fault",
]

_BASE_RANGE, _BASE_WIDTH = 0.02, 768  # BERT-base, by which other widths go
# name -> (layers, hidden size). Turc et al. 2019 (arXiv:1908.08962), and Devlin et al. 2018 (arXiv:1810.04805).
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


@dataclass(frozen=True)
class Parts:
    """What a run is made of: its settings, and the tokenizer, task and model (on the CPU) that follow from them."""

    settings: Settings
    tokenizer: Tokenizer
    task: Task
    model: BertPreTrainedModel


def build(
    settings: Settings,
    *,
    longest: int = 0,
    tokens_dir: Path | None = None,
    on_main: OnMain = lambda action: action(),
) -> Parts:
    """Reads tokenizer, examples and model.

    Args:
        settings: of the run.
        longest: tokens of a sequence that the model must be able to take, beside those of `settings`.
        tokens_dir: where tokens of the examples are kept for the next start and for other processes; None: nowhere.
        on_main: calls a function in the main process, while others wait: `Processes.on_main`.

    Raises:
        SettingsError: settings that contradict one another, the examples or the model.
        OSError, CheckpointError, SourceError, StoreError: a file is missing or wrong.
    """
    data, model_name = settings.data, settings.model.model
    longest = max(longest, data.max_length)
    with settings_at_fault():
        if os.path.isdir(model_name):
            data.model_class.read_config(model_name)  # of another family: said before examples are read
        tokenizer = load_tokenizer(settings.model)
        torch.manual_seed(settings.training.seed)  # of random weights, the same in every process
        sources = data.sources(tokenizer, seed=settings.training.seed, tokens_dir=tokens_dir, on_main=on_main)
        task = data.make_task(*sources)
        if data.is_pretraining:
            model = new_model(data.model_class, model_name, tokenizer, longest)
        else:
            model = load_model(data.model_class, model_name, tokenizer, longest, task.model_config())
        return Parts(dataclasses.replace(settings, data=data.completed(task)), tokenizer, task, model)


@contextlib.contextmanager
def settings_at_fault() -> Iterator[None]:
    """What sources, tasks and models refuse is for those who wrote the settings: SettingsError, without a traceback."""
    try:
        yield
    except (OSError, SettingsError, SourceError):
        raise
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


def make_config(size: str, vocab_size: int, **overrides: Any) -> BertConfig:
    """The configuration of a size by its name: heads of 64, 4 times as wide within a layer.

    A size narrower than BERT-base has weights drawn from a wider distribution, such that what a layer adds to its input
    is as large, in proportion, as in BERT-base: initializer_range is 0.02 * sqrt(768 / hidden_size), 0.049 for a width
    of 128. With 0.02 attention hardly begins to matter there (docs/pretraining.md).

    Args:
        size: a key of `SIZES`.
        vocab_size: tokens that the tokenizer knows.
        overrides: further fields.

    Raises:
        ValueError: another name. TypeError, ValueError: see `BertConfig`.
    """
    check_choice("size", size, SIZES)
    layers, hidden = SIZES[size]
    values = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "initializer_range": round(_BASE_RANGE * math.sqrt(max(1.0, _BASE_WIDTH / hidden)), 4),
    }
    return BertConfig(**values | overrides)


def load_tokenizer(settings: ModelSettings) -> Tokenizer:
    """The tokenizer that the settings name, or that lies beside the model.

    Raises:
        SettingsError: neither is there.
        FileNotFoundError, ValueError: its files are missing or damaged.
    """
    place: str | None = settings.tokenizer
    if place is None:
        if not os.path.isdir(settings.model):
            raise SettingsError(f"tokenizer: expected one, as there is none beside model={settings.model}")
        place = settings.model
    is_vocabulary = Path(place).suffix == ".txt"
    if settings.cased and not is_vocabulary:
        raise SettingsError(f"cased: goes with a vocab.txt; {place} knows what it is")
    options = {"do_lower_case": not settings.cased} if is_vocabulary else {}
    return tokenization.load_tokenizer(place, **options)


def new_model(cls: type[BertPreTrainedModel], name: str, tokenizer: Tokenizer, max_length: int) -> BertPreTrainedModel:
    """A model to pre-train: with random weights (a size of `SIZES`, a config.json), or those of a checkpoint directory.

    Raises:
        SettingsError: there is no such model, or it has fewer words or positions than are needed.
        CheckpointError: see `load_model`.
    """
    if name in SIZES:
        sizes = {"max_position_embeddings": max(512, max_length), "pad_token_id": tokenizer.pad_token_id}
        config = make_config(name, len(tokenizer), **sizes)
    elif os.path.isfile(name):
        config = BertConfig.from_json_file(name)
    elif os.path.isdir(name):
        return load_model(cls, name, tokenizer, max_length)
    else:
        raise SettingsError(
            f"model: expected one of {', '.join(SIZES)}, a config.json or a checkpoint directory, got {name!r}"
        )
    _check_fit(config, tokenizer, max_length)
    return cls(config)


def load_model(
    cls: type[BertPreTrainedModel],
    directory: str | os.PathLike[str],
    tokenizer: Tokenizer,
    max_length: int,
    values: Mapping[str, Any] | None = None,
    *,
    may_lack_head: bool = True,
) -> BertPreTrainedModel:
    """A model with a checkpoint's encoder; a head that the checkpoint lacks, or has for other labels, is new.

    Args:
        cls: of the model.
        directory: of the checkpoint.
        tokenizer: whose ids the model is to take.
        max_length: tokens of a sequence that it is to take.
        values: fields of the configuration that replace those of the file: the labels.
        may_lack_head: False: every parameter must be there.

    Raises:
        SettingsError: it has fewer words or positions than are needed.
        CheckpointError: files are missing or broken, or a part that must be there is not.
    """
    if not os.path.isdir(directory):
        raise SettingsError(f"model: expected a checkpoint directory, got {os.fspath(directory)!r}")
    if os.path.isfile(os.path.join(directory, STATE)):  # a checkpoint of a run: it knows its digests
        check_files(Path(directory), WEIGHTS)
    # Weights are trained in fp32, whatever they are stored in.
    config = cls.read_config(directory, dtype=None, **(values or {}))
    _check_fit(config, tokenizer, max_length)
    state_dict = load_checkpoint(directory)
    check_sizes(config, state_dict, model_name=cls.__name__, source=directory)
    model = cls(config)
    report = load_into(model, state_dict, ignore_mismatched_sizes=True, source=directory)
    lost = [*report.missing, *(mismatch.name for mismatch in report.mismatched)]
    if may_lack_head:
        lost = [name for name in lost if name.startswith("bert.") and not name.startswith("bert.pooler.")]
    if lost:
        what = "the whole encoder" if may_lack_head else f"a {cls.__name__}"
        raise CheckpointError(f"{directory}: expected {what}; missing or of other shapes: {list_names(lost)}")
    return model


def _check_fit(config: BertConfig, tokenizer: Tokenizer, max_length: int) -> None:
    if len(tokenizer) > config.vocab_size:
        raise SettingsError(
            f"tokenizer: expected at most the model's vocab_size={config.vocab_size} tokens, got {len(tokenizer)}"
        )
    if max_length > config.max_position_embeddings:
        raise SettingsError(
            f"max_length: expected at most the model's {config.max_position_embeddings} positions, got {max_length}"
        )
