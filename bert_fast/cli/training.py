"""What `finetune` and `pretrain` share: a run from its parts, and what it leaves."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from bert_fast.cli.common import is_main_process
from bert_fast.terminal import printable

__all__ = ["one_line", "train"]


def one_line(command: str, work: Callable[[], int]) -> int:
    """Runs a command; what is wrong with files and arguments is one line and status 1."""
    try:
        return work()
    except (OSError, ImportError, TypeError, ValueError) as error:
        if is_main_process():
            print(printable(f"bert-fast {command}: {error}"), file=sys.stderr)
        return 1


def train(
    model: Any, arguments: Any, train: Any, valid: Any, tokenizer: Any, compute_metrics: Any, answers: Any = None
) -> int:
    """Trains, or goes on from the last checkpoint in output_dir; leaves the model, its state and its metrics there."""
    from bert_fast.training import Trainer, last_checkpoint
    from bert_fast.training.curves import CurvesCallback

    if not is_main_process():
        warnings.simplefilter("ignore")  # the main process says the same
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=valid,
        processing_class=tokenizer,
        compute_metrics=None if valid is None else compute_metrics,
        preprocess_logits_for_metrics=answers,
        callbacks=[CurvesCallback()],
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or last_checkpoint(arguments.output_dir))
    trainer.save_model()
    trainer.save_state()
    metrics = {} if valid is None else trainer.evaluate()
    if valid is not None:
        trainer.save_metrics("eval", metrics)
    if is_main_process():
        said = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if _is_figure(name))
        print(printable(f"{arguments.output_dir}: {trainer.state.global_step:,} steps; {said}".rstrip("; ")))
    return 0


def _is_figure(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
