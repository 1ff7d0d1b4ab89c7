"""What `finetune` and `pretrain` share: a run from its parts, and what it leaves."""

import errno
import sys
import tempfile
from pathlib import Path
from typing import Any

from bert_fast.cli.common import is_main_process, say
from bert_fast.terminal import printable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_TORCH = ("PytorchStreamWriter", "inline_container.cc")  # what torch.save names in its errors


def check_output(folder: str) -> None:
    """Raises OSError where a folder cannot be made or written. Makes nothing."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(f"output_dir: {folder} cannot be made or written: {place}: {error.strerror}") from None


def train(
    command: str, model: Any, arguments: Any, train: Any, valid: Any, tokenizer: Any, compute_metrics: Any,
    answers: Any = None,
) -> int:  # fmt: skip
    """Trains, or goes on from the last checkpoint in output_dir; leaves the model, its state and its metrics there."""
    from bert_fast.training import Trainer, last_checkpoint
    from bert_fast.training.curves import CurvesCallback

    if not sys.stderr.isatty():
        arguments.disable_tqdm = True
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # each line of the log as it comes
    start = arguments.resume_from_checkpoint or last_checkpoint(arguments.output_dir)
    if start is not None and is_main_process():
        say(command, f"going on from {start}")
    try:
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
        trainer.train(resume_from_checkpoint=start)
        trainer.save_model()
        trainer.save_state()
        metrics = {} if valid is None else _last_evaluation(trainer) or trainer.evaluate()
        if valid is not None:
            trainer.save_metrics("eval", metrics)
    except KeyboardInterrupt:
        if is_main_process():
            place = last_checkpoint(arguments.output_dir) or "its start, as no checkpoint was written yet"
            say(command, f"interrupted; the same command goes on from {place}")
        return 130
    except Exception as error:
        if isinstance(error, KeyError) and "metric_for_best_model" in str(error):
            raise ValueError(error.args[0]) from None
        if not _is_of_writing(error):
            raise
        raise OSError(f"{arguments.output_dir}: cannot be written, the disk may be full: {error}") from error
    if is_main_process():
        figures = {name: value for name, value in metrics.items() if name.startswith("eval_") and not is_time(name)}
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(printable(f"{arguments.output_dir}: {trainer.state.global_step:,} steps; {said}".rstrip("; ")))
    return 0


def _last_evaluation(trainer: Any) -> dict[str, float]:
    """That of the last step, where there was one of the model as it is now."""
    state = trainer.state
    if trainer.args.load_best_model_at_end:
        return {}
    return next((one for one in state.log_history if one["step"] == state.global_step and "eval_loss" in one), {})


def _is_of_writing(error: Exception) -> bool:
    """Whether a file could not be written to its end: PyTorch and safetensors have errors of their own for that."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return type(error).__name__ == "SafetensorError" or any(name in str(error) for name in _OF_TORCH)


def is_time(name: str) -> bool:
    """Whether a metric says how long the evaluation took."""
    return name.endswith(("_runtime", "_per_second", "_preparation_time"))
