"""`bert-fast pretrain`: a model that learns to fill in words from plain text."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_fast.cli.common import need
from bert_fast.cli.training import check_output, train

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


def make_config(size: str, vocab_size: int, **overrides: Any) -> Any:
    """The `BertConfig` of a size by its name: heads of 64, 4 times as wide within a layer.

    A size narrower than BERT-base has weights drawn from a wider distribution, such that what a layer adds to its input
    is as large, in proportion, as in BERT-base: initializer_range is 0.02 * sqrt(768 / hidden_size), 0.049 for a width
    of 128. With 0.02 attention hardly begins to matter there (docs/pretraining.md).

    overrides: further fields. Raises: ValueError: another name.
    """
    from bert_fast.checks import check_choice
    from bert_fast.models import BertConfig

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


def run(argv: Sequence[str]) -> int:
    """Trains; returns the exit status."""
    need("'bert_fast[train]'", "transformers", "accelerate", "yaml")
    import transformers

    from bert_fast.cli.arguments import ModelArguments, check_fit, make_parser, parsed
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks.pretraining import Pretraining, PretrainingArguments

    parser = make_parser(
        "pretrain", str(Pretraining.__doc__), (ModelArguments, PretrainingArguments, TrainingArguments)
    )
    model_arguments, data, arguments = parsed(parser, argv)
    check_output(arguments.output_dir)
    transformers.set_seed(arguments.seed)
    tokenizer = model_arguments.tokenizer(without=SIZES)
    task = Pretraining(data, tokenizer)
    model = _model(task.model_class, model_arguments.model_name_or_path, tokenizer, data.max_seq_length)
    check_fit(model.config, tokenizer, data.max_seq_length)
    tokens = Path(arguments.output_dir) / "tokens"
    valid: Any = None
    with arguments.main_process_first(desc="tokenizing"):
        examples = task.read(data.train_file, arguments.seed, tokens / "train")
        if data.validation_file is not None:
            valid = task.read(data.validation_file, arguments.seed, tokens / "validation")
    return train(
        "pretrain", model, arguments, examples, valid, tokenizer,
        lambda said: task.metrics(examples, valid, said.predictions, said.label_ids), task.answers,
    )  # fmt: skip


def _model(cls: Any, name: str, tokenizer: Any, max_seq_length: int) -> Any:
    """A model with random weights (a size of `SIZES`, a config.json), or with those of a folder or name."""
    import torch

    from bert_fast.errors import CheckpointError
    from bert_fast.hub import is_hub_name
    from bert_fast.models import BertConfig

    if name in SIZES:
        positions = max(512, max_seq_length)
        return cls(
            make_config(
                name, len(tokenizer), max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id
            )
        )  # fmt: skip
    if Path(name).is_file():
        return cls(BertConfig.from_json_file(name))
    if Path(name).is_dir():
        return cls.from_pretrained(name, dtype=torch.float32)
    expected = f"model_name_or_path: expected one of {', '.join(SIZES)}, a config.json or a model"
    if not is_hub_name(name):
        raise ValueError(f"{expected}, got {name!r}")
    try:
        return cls.from_pretrained(name, dtype=torch.float32)
    except CheckpointError as error:
        raise CheckpointError(f"{expected}; {error}") from error
