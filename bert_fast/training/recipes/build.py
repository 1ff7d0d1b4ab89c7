"""From settings to what a `Trainer` takes: tokenizer, task and model.

A model starts from a size by its name, a configuration, or a checkpoint whose head may be another one.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_fast.checks import check_choice
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.counter_random import CounterRandom
from bert_fast.errors import CheckpointError, SourceError
from bert_fast.models import BertConfig, BertPreTrainedModel
from bert_fast.models.checkpoint import list_names, load_checkpoint, load_into
from bert_fast.models.shapes import check_sizes
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.checkpoints import STATE, WEIGHTS, check_files
from bert_fast.training.recipes.settings import ModelSettings, PretrainData, QaData, Settings, SettingsError
from bert_fast.training.recipes.tasks import make_task, model_class, read_source
from bert_fast.training.task import Task

__all__ = [
    "SIZES",
    "Parts",
    "build",
    "load_model",
    "load_tokenizer",
    "make_config",
    "new_model",
    "pretraining_source",
    "settings_at_fault",
]

# name -> (layers, hidden size). Turc et al. 2019 (arXiv:1908.08962), and Devlin et al. 2018 (arXiv:1810.04805).
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}

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


def make_config(size: str, vocab_size: int, **overrides: Any) -> BertConfig:
    """The configuration of a size by its name: heads of 64, 4 times as wide within a layer.

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
    }
    return BertConfig(**values | overrides)


def load_tokenizer(settings: ModelSettings) -> BertTokenizer:
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
    return BertTokenizer.from_pretrained(place, **options)


def new_model(
    cls: type[BertPreTrainedModel], name: str, tokenizer: BertTokenizer, max_length: int
) -> BertPreTrainedModel:
    """A model to pre-train: with random weights (a size of `SIZES`, a config.json), or those of a checkpoint directory.

    Raises:
        SettingsError: there is no such model, or it has fewer words or positions than are needed.
        CheckpointError: see `load_model`.
    """
    if name in SIZES:
        config = make_config(name, len(tokenizer), max_position_embeddings=max(512, max_length))
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
    tokenizer: BertTokenizer,
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
    config = BertConfig.from_pretrained(directory, dtype=None, **(values or {}))
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


def _check_fit(config: BertConfig, tokenizer: BertTokenizer, max_length: int) -> None:
    if len(tokenizer) > config.vocab_size:
        raise SettingsError(
            f"tokenizer: expected at most the model's vocab_size={config.vocab_size} tokens, got {len(tokenizer)}"
        )
    if max_length > config.max_position_embeddings:
        raise SettingsError(
            f"max_length: expected at most the model's {config.max_position_embeddings} positions, got {max_length}"
        )
