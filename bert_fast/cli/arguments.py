"""Flags of `finetune`, `pretrain` and `predict`: those of transformers, of the task and of the model."""

import argparse
import dataclasses
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import HfArgumentParser

from bert_fast import tokenization
from bert_fast.cli.common import check_flags, nearest
from bert_fast.errors import SourceError
from bert_fast.terminal import printable
from bert_fast.tokenization import Tokenizer

# Of transformers' hundred flags, those that most runs set, and what they do; --help shows no others.
_USUAL = {
    "output_dir": "Folder for the model, its checkpoints and its curves.",
    "per_device_train_batch_size": "Examples of a batch, for each device.",
    "gradient_accumulation_steps": "Batches whose gradients one step adds up.",
    "num_train_epochs": "How often training goes through the examples.",
    "max_steps": "Steps of training; takes the place of num_train_epochs.",
    "learning_rate": "Greatest learning rate.",
    "weight_decay": "Weight decay of matrices.",
    "warmup_steps": "Steps in which the learning rate rises; below 1: a share of all steps.",
    "lr_scheduler_type": "How the learning rate falls after that.",
    "bf16": "Compute in bf16.",
    "fp16": "Compute in fp16.",
    "seed": "Seed of weights, order and dropout.",
    "logging_steps": "Steps between two lines of the log; below 1: a share of all steps.",
    "eval_strategy": "When validation_file is evaluated.",
    "eval_steps": "Steps between two evaluations.",
    "save_strategy": "When a checkpoint is written.",
    "save_steps": "Steps between two checkpoints.",
    "save_total_limit": "Most checkpoints to keep.",
    "load_best_model_at_end": "Keep the best model that was evaluated, not the last.",
    "report_to": "Where figures go beside the log, such as tensorboard.",
    "dataloader_num_workers": "Processes that make batches.",
}
# How --help names a flag's value, by the function that reads it.
_METAVARS = {"int": "N", "float": "X", "string_to_bool": "BOOL"}
_MOST_CHOICES = 4  # that --help lists; errors list all


@dataclass
class ModelArguments:
    """The model to start from, and its tokenizer."""

    model_name_or_path: str = field(
        metadata={
            "help": "Folder of a model, or its name on the hub; to pretrain also a config.json, or a size: tiny, mini, "
            "small, medium, base, large."
        }
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Folder, name on the hub, tokenizer.json or vocab.txt; default: beside the model."},
    )
    cased: bool = field(default=False, metadata={"help": "With a vocab.txt: keep case and accents."})

    def tokenizer(self, without: Collection[str] = ()) -> Tokenizer:
        """The tokenizer that is named, or that lies beside the model.

        without: names of models that have none.

        Raises: ValueError, FileNotFoundError: there is none, or it is damaged.
        """
        place = self.tokenizer_name
        if place is None:
            place = self.model_name_or_path
            if place in without or Path(place).is_file():
                raise ValueError(f"tokenizer_name: expected one, as none lies beside {place}")
        is_vocabulary = Path(place).suffix == ".txt"
        if self.cased and not is_vocabulary:
            raise ValueError(f"cased: goes with a vocab.txt; {place} knows what it is")
        return tokenization.load_tokenizer(place, **({"do_lower_case": not self.cased} if is_vocabulary else {}))


def make_parser(
    command: str, description: str, classes: Sequence[type], hidden: Collection[str] = ()
) -> HfArgumentParser:
    """A parser of dataclasses, with --config.

    --help shows one spelling of each flag, and neither `hidden` flags nor most of transformers'.
    """
    parser = HfArgumentParser(
        classes, prog=f"bert-fast {command}", description=description.split("\n\n")[0], allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
    )  # fmt: skip
    theirs = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}
    for action in parser._actions:
        is_negation = isinstance(action, argparse._StoreFalseAction)
        if action.dest in hidden or action.dest in theirs - set(_USUAL) or is_negation:
            action.help = argparse.SUPPRESS
        elif action.dest in theirs:
            action.help = _USUAL[action.dest]
        if action.help == argparse.SUPPRESS or action.nargs == 0:
            continue
        if action.default not in (None, False):
            action.help = f"{action.help} [%(default)s]"
        action.option_strings = action.option_strings[:1]
        if action.choices is None or len(list(action.choices)) > _MOST_CHOICES:
            action.metavar = _METAVARS.get(getattr(action.type, "__name__", ""), "NAME")
    parser.usage = "%(prog)s [--config FILE] [--flag value ...]"
    parser._actions[0].help = "Prints this."
    parser.epilog = "All other flags of transformers.TrainingArguments are taken, too."
    parser.add_argument("--config", metavar="FILE", help="Flags in YAML, name: value. The command line wins.")
    return parser


def parsed(parser: HfArgumentParser, argv: Sequence[str]) -> tuple[Any, ...]:
    """The dataclasses that the command line, and the file after --config, make.

    Raises:
        SourceError: the file cannot be read, names an unknown flag or has a value that the flag cannot take.
        ValueError: as of the dataclasses.
        SystemExit: as of every parser.
    """
    config = argparse.ArgumentParser(parser.prog, usage=parser.usage, add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    known, rest = config.parse_known_args(list(argv))
    if known.config is not None:
        rest = [*_flags_of(known.config, parser), *rest]
    check_flags(parser, rest)
    unknown = parser.parse_known_args(rest)[1]
    if unknown:
        parser.error(printable(f"unrecognized arguments: {' '.join(unknown)}"))
    made: tuple[Any, ...] = parser.parse_args_into_dataclasses(rest, look_for_args_file=False)
    return made[: len(parser.dataclass_types)]


def _flags_of(file: str, parser: HfArgumentParser) -> list[str]:
    import yaml

    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"{file}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SourceError(f"{file}: expected lines of the form name: value, got {type(values).__name__}")
    flags, actions = [], _actions(parser)
    for name, value in values.items():
        if name not in actions:
            raise SourceError(f"{file}: {name}: no such flag{nearest(name, actions)}")
        several = value if isinstance(value, list) and actions[name].nargs == "+" else [value]
        if not several or not all(isinstance(one, str | int | float | None) for one in several):
            raise SourceError(f"{file}: {name}: expected one value, got {reprlib.repr(value)}")
        if value is not None:
            flags += [f"--{name}={value}"] if value is several[0] else [f"--{name}", *map(str, several)]
    return flags


def _actions(parser: HfArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in reversed(parser._actions) if action.dest not in ("help", "config")}


def check_fit(config: Any, tokenizer: Tokenizer, max_seq_length: int) -> None:
    """Raises ValueError where a model has fewer words or positions than are needed."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"tokenizer_name: expected at most the model's {config.vocab_size} tokens, got {len(tokenizer)}"
        )
    if max_seq_length > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_length: expected at most the model's {config.max_position_embeddings} positions, got "
            f"{max_seq_length}"
        )
