"""`bert-fast finetune`: a pre-trained model that learns a task from examples."""

import dataclasses
import warnings
from collections.abc import Sequence

from bert_fast.cli.common import need
from bert_fast.cli.training import check_output, train

_TASKS = "classify, ner, qa, choice"
_LEARNED_BEFORE = ("bert.embeddings.", "bert.encoder.")  # the rest is learned from the examples
_OF_TASK = "of the task"  # metric_for_best_model, unless a flag names one


def run(argv: Sequence[str]) -> int:
    """Trains; returns the exit status."""
    if not argv or argv[0].startswith("-"):
        print(
            "usage: bert-fast finetune TASK [--config FILE] [--flag value ...]\n\n"
            f"Trains a model for a task. TASK is one of {_TASKS}; `bert-fast finetune TASK --help` lists its flags."
        )
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    need("'bert_fast[train]'", "transformers", "accelerate", "datasets", "yaml")
    import torch
    import transformers

    from bert_fast.cli.arguments import ModelArguments, check_fit, make_parser, parsed
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks import task_named

    name, *argv = argv
    kind = task_named(name)
    parser = make_parser(f"finetune {name}", str(kind.__doc__), (ModelArguments, kind.Arguments, TrainingArguments))
    parser.set_defaults(metric_for_best_model=_OF_TASK)
    model_arguments, data, arguments = parsed(parser, argv)
    if data.train_file is None:
        parser.error("the following arguments are required: --train_file")
    check_output(arguments.output_dir)
    kind.model_class.read_config(model_arguments.model_name_or_path)  # of another family: said before examples are read
    transformers.set_seed(arguments.seed)
    tokenizer = model_arguments.tokenizer()
    task = kind(data, tokenizer)
    examples, valid = task.read(data.train_file), None
    if data.validation_file is not None:
        valid = task.read(data.validation_file)
    source = model_arguments.model_name_or_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the head, which is to be learned
        model, report = kind.model_class.from_pretrained(
            source, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True, **task.config()
        )
    for key in sorted(report["missing_keys"]):
        if key.startswith(_LEARNED_BEFORE):
            raise ValueError(f"{source}: expected the weights of a model, got none of {key}")
    check_fit(model.config, tokenizer, data.max_seq_length)
    # How examples are read, for `bert-fast predict`.
    reading = {key: value for key, value in dataclasses.asdict(data).items() if not key.endswith("_file")}
    model.config.task_specific_params = {name: reading}
    if arguments.metric_for_best_model == _OF_TASK:
        arguments.metric_for_best_model = task.metric_for_best_model
    elif arguments.metric_for_best_model.endswith("mse"):
        arguments.greater_is_better = False  # transformers knows of losses only
    return train(
        "finetune", model, arguments, examples, valid, tokenizer,
        lambda said: task.metrics(valid, said.predictions, said.label_ids),
    )  # fmt: skip
