"""From settings to what a `Trainer` takes: tokenizer, task and model."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.counter_random import CounterRandom
from bert_fast.errors import SourceError
from bert_fast.models import BertPreTrainedModel
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.recipes.models import load_model, load_tokenizer, new_model
from bert_fast.training.recipes.settings import PretrainData, QaData, Settings, SettingsError
from bert_fast.training.recipes.tasks import make_task, model_class, read_source
from bert_fast.training.task import Task

__all__ = ["Parts", "build", "pretraining_source", "settings_at_fault"]

OnMain = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Parts:
    """What a run is made of: its settings, and the tokenizer, task and model (on the CPU) that follow from them."""

    settings: Settings
    tokenizer: BertTokenizer
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
        tokenizer = load_tokenizer(settings.model)
        torch.manual_seed(settings.training.seed)  # of random weights, the same in every process
        if isinstance(data, PretrainData):
            train = pretraining_source(settings, data.train, tokenizer, _below(tokens_dir, "train"), on_main)
            valid = None
            if data.valid is not None:
                valid = pretraining_source(settings, data.valid, tokenizer, _below(tokens_dir, "valid"), on_main)
            task = make_task(data, train, valid)
            model = new_model(model_class(data), model_name, tokenizer, longest)
        else:
            task = make_task(data, *_examples(settings, tokenizer, tokens_dir))
            if isinstance(data, QaData):  # what the examples say of it, for those who use the model
                settings = dataclasses.replace(settings, data=dataclasses.replace(data, may_abstain=task.may_abstain))
            model = load_model(model_class(data), model_name, tokenizer, longest, task.model_config())
        return Parts(settings, tokenizer, task, model)


def pretraining_source(
    settings: Settings,
    files: Sequence[str],
    tokenizer: BertTokenizer,
    place: Path | None = None,
    on_main: OnMain = lambda action: action(),
) -> Any:
    """Examples to pre-train on, of text files or of one token store.

    Args:
        settings: how they are made.
        files: text files, or the directory of one store.
        tokenizer: makes the tokens.
        place: of the store that text files become; None: it is forgotten with the source.
        on_main: see `build`.

    Raises:
        SettingsError, OSError, SourceError, StoreError: see `build`.
    """
    from bert_fast.data.pretraining import PretrainingSource

    data = settings.data
    assert isinstance(data, PretrainData)

    def tokenize(directory: Path) -> TokenStore:
        return tokenize_files(files, directory, tokenizer, format=data.format, field=data.field)

    stores = [file for file in files if os.path.isdir(file)]
    if stores and len(files) > 1:
        raise SettingsError(f"train, valid: expected text files, or one token store, got {', '.join(files)}")
    if stores:
        store = TokenStore.open(files[0], tokenizer)
    elif place is not None:
        on_main(lambda: str(tokenize(place).path))
        store = TokenStore.open(place, tokenizer)
    else:
        with tempfile.TemporaryDirectory() as temporary:  # the store stays mapped into memory
            store = tokenize(Path(temporary) / "store")
    return PretrainingSource(
        store,
        tokenizer,
        max_length=data.max_length,
        next_sentence=data.next_sentence,
        whole_words=data.whole_words,
        mask_probability=data.mask_probability,
        seed=settings.training.seed,
        short_sequence_probability=data.short_sequence_probability,
    )


@contextlib.contextmanager
def settings_at_fault() -> Iterator[None]:
    """What sources, tasks and models refuse is for those who wrote the settings: SettingsError, without a traceback."""
    try:
        yield
    except (OSError, SettingsError, SourceError):
        raise
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


def _examples(settings: Settings, tokenizer: BertTokenizer, cache: Path | None) -> tuple[Any, Any]:
    """(examples to train on, examples to judge by) of fine-tuning."""
    data: Any = settings.data
    train = read_source(data, tokenizer, data.train, cache_dir=cache)
    if data.valid is not None:
        labels = getattr(train, "label_names", None) or None
        return train, read_source(data, tokenizer, data.valid, labels=labels, cache_dir=cache)
    share = getattr(data, "valid_share", None)
    return (train, None) if share is None else _divided(train, share, settings.training.seed)


def _divided(source: Any, share: float, seed: int) -> tuple[Any, Any]:
    """(most examples, a random share of them)."""
    is_windows = hasattr(source, "take_questions")  # a question may be several examples: it stays whole
    count, take = (source.num_questions, source.take_questions) if is_windows else (len(source), source.take)
    order = CounterRandom(seed, 0, "examples to judge by").permutation(count)
    kept = max(1, round(share * count))
    if kept >= count:
        raise SettingsError(f"valid_share: {share} leaves none of {count} examples to train on")
    return take(order[kept:]), take(order[:kept])


def _below(directory: Path | None, name: str) -> Path | None:
    if directory is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name
