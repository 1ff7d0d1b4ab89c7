"""`bert-fast finetune`: a pre-trained model that learns a task from examples."""

import warnings
from collections.abc import Sequence

from bert_fast.cli.training import one_line, train

__all__ = ["run"]

_TASKS = "classify, ner, qa, choice"


def run(argv: Sequence[str]) -> int:
    """Trains; returns 0, 1 where an argument or a file is wrong, 2 for unknown flags."""
    if not argv or argv[0].startswith("-"):
        print(f"usage: bert-fast finetune TASK [--config FILE] [--flag value ...]\n\nTASK: {_TASKS}; each has --help")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return one_line("finetune", lambda: _run(argv[0], argv[1:]))


def _run(name: str, argv: Sequence[str]) -> int:
    import torch
    import transformers

    from bert_fast.cli.arguments import ModelArguments, check_fit, make_parser, parsed
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks import task_named

    kind = task_named(name)
    parser = make_parser(f"finetune {name}", str(kind.__doc__), (ModelArguments, kind.Arguments, TrainingArguments))
    model_arguments, data, arguments = parsed(parser, argv)
    kind.model_class.read_config(model_arguments.model_name_or_path)  # of another family: said before examples are read
    transformers.set_seed(arguments.seed)
    tokenizer = model_arguments.tokenizer()
    task = kind(data, tokenizer)
    examples, valid = task.read(data.train_file), None
    if data.validation_file is not None:
        valid = task.read(data.validation_file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left at their initial values")  # the head, which is to be learned
        model = kind.model_class.from_pretrained(
            model_arguments.model_name_or_path, dtype=torch.float32, ignore_mismatched_sizes=True, **task.config()
        )
    check_fit(model.config, tokenizer, data.max_seq_length)
    return train(
        model, arguments, examples, valid, tokenizer, lambda said: task.metrics(valid, said.predictions, said.label_ids)
    )
