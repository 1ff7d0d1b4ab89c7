"""`Trainer`: transformers' Trainer on batches without padding, whose size is a number of tokens."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from bert_fast.data.batches import Batches, Source
from bert_fast.data.packed_collator import PackedCollator
from bert_fast.env import bound_kernel_cache
from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.models import BertPreTrainedModel
from bert_fast.models.checkpoint import load_checkpoint, load_into
from bert_fast.optim import AdamW, make_lamb, weight_decay_groups
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.arguments import TrainingArguments
from bert_fast.training.loading import PLACE, Features, batch_loader
from bert_fast.training.losses import label_counts, loss_parts
from bert_fast.training.replaying import Replayed, check_replayable, run_budgets

__all__ = ["Trainer", "last_checkpoint"]

_WEIGHTS = "loss_weights"  # the entry of a batch that says what its loss counts in its step
_STATE = "trainer_state.json"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # what `AdamW` computes


class Trainer(transformers.Trainer):
    """`transformers.Trainer` with packed batches; checkpoints, resuming, logs, evaluation and processes are theirs.

    - train_dataset and eval_dataset are a `Source`, which makes its batches, or a data set of features as a tokenizer
      returns them (input_ids, labels), joined by data_collator (default: `PackedCollator`). A data set of transformers'
      kind with a column `length` is not looked through for its lengths.
    - Batches hold up to `per_device_train_batch_tokens` tokens, and are the same for any number of processes and
      workers: a step of 2 processes is that of one with gradient_accumulation_steps doubled, but for dropout.
    - The loss of a step is the mean over all its labels, in all batches and processes; of pre-training on pairs of
      texts there are two such means.
    - Optimizers are this library's (`AdamW`, or `Lamb`), unless `optim` or `optimizers` asks for another one. They clip
      to max_grad_norm while they step.
    - A run that was killed goes on from its last checkpoint to the same bits: `train(resume_from_checkpoint=True)`
      takes the newest one that was written to its end.

    model: of `bert_fast.models`, or transformers', fused or not. compute_metrics gets predictions and labels over all
    examples in their order: [n, ...] an example, [T, ...] for what belongs to tokens, None where there are none.

    Raises: TypeError, ValueError naming the argument.
    """

    args: TrainingArguments
    optimizer: Any
    control: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(args, TrainingArguments):
            raise TypeError(f"args: expected bert_fast.training.TrainingArguments, got {type(args).__name__}")
        if args.n_gpu > 1:
            raise ValueError(f"args: expected a process for each GPU (torchrun), got one process for {args.n_gpu} GPUs")
        if args.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor: expected 0, got {args.label_smoothing_factor}")
        if options.get("compute_loss_func") is not None:
            raise ValueError("compute_loss_func: expected None, as batches are weighted by their labels here")
        if args.device.type == "cpu":
            bound_kernel_cache()
        super().__init__(model, args, data_collator or PackedCollator(), **options)
        self.model_accepts_loss_kwargs = True  # losses come weighted: nobody divides them by the batches of a step
        self._clips_in_step = False
        self._replayed: Replayed | None = None
        self._batches: Batches | None = None
        if args.graphs:
            check_replayable(self.model)

    # Batches

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """transformers' one way to a loader: of examples to train on (shuffled), or to judge by (in their order)."""
        source = self._source(dataset, description)
        args, limits = self.args, self.args.batch_limits(is_training)
        if not len(source.lengths(0)):
            raise ValueError(f"{description.lower()}: expected examples, got none")
        if not is_training and "max_tokens" in limits:  # an example that is longer is a batch of its own
            limits["max_tokens"] = max(limits["max_tokens"], int(source.lengths(0).max()))
        seed = args.seed if args.data_seed is None else args.data_seed
        batches = Batches(source, shuffle=is_training, seed=seed, **limits)
        if is_training:
            self._batches = batches
        return batch_loader(
            batches,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=is_training and args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _source(self, dataset: Any, description: str) -> Source:
        if isinstance(dataset, Source):
            return dataset
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                f"{description.lower()}: expected a Source, or a data set with a length and indices, got "
                f"{type(dataset).__name__}"
            )
        columns = getattr(dataset, "column_names", None) or ()
        lengths = dataset["length"] if "length" in columns else None
        if columns:
            dataset = self._remove_unused_columns(dataset, description=description)
        return Features(dataset, self.data_collator, lengths)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The batches of a step in this process, each with its share of the step's labels."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        counts = []
        for batch in batches:
            found, place = label_counts(batch), batch.pop(PLACE)
            if not found:
                raise ValueError(f"train_dataset: expected batches with labels, got {', '.join(batch)}")
            counts.append(dict.fromkeys(found, 0) if place.is_spare else found)
        totals: Any = torch.tensor([sum(one[part] for one in counts) for part in counts[0]], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals.float().to(device), "sum")
        # Gradients of processes are averaged, so that a part's weight is its share of an average process's.
        scales = self.accelerator.num_processes / totals.clamp(min=1)
        scales = dict(zip(counts[0], scales.tolist() if scales.device.type == "cpu" else scales, strict=True))
        for batch, one in zip(batches, counts, strict=True):
            batch[_WEIGHTS] = {part: count * scales[part] for part, count in one.items()}
        return batches, torch.ones((), device=device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, PackedBatch):
            return inputs.to(self.args.device, non_blocking=True)
        return super()._prepare_inputs(inputs)

    # Steps

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch, weighted by its labels among those of the step."""
        weights = inputs.pop(_WEIGHTS, None)
        outputs = model(**inputs)
        parts = loss_parts(outputs, inputs)
        loss = _total(_times(part, 1 if weights is None else weights[name]) for name, part in parts.items())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward; replayed as a CUDA graph where the arguments ask for it."""
        if not self.args.graphs:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if self._replayed is None:
            assert self._batches is not None
            positions = self.model.config.max_position_embeddings
            budgets = run_budgets(self._batches, math.ceil(self.state.num_train_epochs), positions)
            self._replayed = Replayed(self.model, self._backward, budgets, self.args.device)
        weights = inputs.pop(_WEIGHTS)
        return self._replayed(inputs, weights)

    def _backward(self, batch: dict[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, {**batch, _WEIGHTS: weights})
        self.accelerator.backward(loss)
        return loss.detach()

    def _run_epoch(self, *positional: Any, **named: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*positional, **named)
        else:  # a run that was over: transformers would make one step more
            self.control.should_training_stop = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW or LAMB of this library, with weight decay on matrices only; or what the arguments ask for."""
        args = self.args
        is_ours = args.lamb or str(getattr(args.optim, "value", args.optim)) in _OPTIMIZERS
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None or not is_ours:
            return super().create_optimizer(model)
        make: Any = make_lamb if args.lamb else AdamW
        self.optimizer = make(
            weight_decay_groups(self.model if model is None else model, args.weight_decay),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            max_grad_norm=args.max_grad_norm or None,
        )
        self._clips_in_step = True
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None if self._clips_in_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return None if self._clips_in_step else super()._get_grad_norm(model, grad_norm=grad_norm)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *rest: Any, **options: Any) -> None:
        if self._clips_in_step:
            grad_norm = getattr(getattr(self.optimizer, "optimizer", self.optimizer), "grad_norm", None)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, and ends a run whose loss is no number any more.

        Raises: TrainingError: with the step, and where the last checkpoint is.
        """
        super().log(logs, start_time)
        loss = logs.get("loss", 0.0)
        if not math.isfinite(loss) and not self.args.logging_nan_inf_filter:
            kept = last_checkpoint(self.args.output_dir) or "no checkpoint was written yet"
            raise TrainingError(
                f"loss: expected a number, got {loss} up to step {self.state.global_step}; a smaller learning_rate "
                f"than {self.args.learning_rate:g}, or more warm-up, may help. Last checkpoint: {kept}"
            )

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss (the mean over all labels), metrics, predictions and labels over all examples, in their order."""
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", [])
        model = self._model_for_evaluation()
        self.callback_handler.eval_dataloader = dataloader
        found: list[tuple[int, list[np.ndarray], list[np.ndarray]]] = []
        sums: dict[str, Any] = {}
        for batch in dataloader:
            place, counts = batch.pop(PLACE), label_counts(batch)
            parts, said, labels = self._asked(model, self._prepare_inputs(batch), ignore_keys)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if place.is_spare:
                continue
            for part, value in parts.items():
                total, count = sums.get(part, (0.0, 0))
                sums[part] = total + value * counts[part], count + counts[part]
            if not prediction_loss_only:
                found.append((place.turn, [_on_host(one) for one in said], [_on_host(one) for one in labels]))
        sums = {part: (float(total), count) for part, (total, count) in sums.items()}
        found, everyone = gather_object(found), gather_object([sums])
        predictions, label_ids = _joined(found, 1), _joined(found, 2)
        metrics = {}
        if label_ids is not None and self.compute_metrics is not None:
            metrics = self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=label_ids))
        metrics = _means(everyone) | denumpify_detensorize(metrics)
        metrics = {_prefixed(name, metric_key_prefix): value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, label_ids, metrics, len(dataloader.dataset))

    def _model_for_evaluation(self) -> nn.Module:
        """The model with autocast, also where nothing was trained yet."""
        model: nn.Module = self.model
        if not self.accelerator._models:
            model = self.accelerator.prepare_model(model, evaluation_mode=not self.is_fsdp_enabled)
            self.model_wrapped = model
        return model.eval()

    def _asked(
        self, model: nn.Module, batch: Any, ignore_keys: Iterable[str]
    ) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """(parts of the loss, what the model says, the labels) of a batch."""
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**batch)
            parts = loss_parts(outputs, batch) if outputs.get("loss") is not None else {}
        said: Any = [
            value for name, value in outputs.items() if name != "loss" and name not in ignore_keys and value is not None
        ]
        labels = [batch[name] for name in self.label_names if batch.get(name) is not None]
        if self.preprocess_logits_for_metrics is not None:
            said = self.preprocess_logits_for_metrics(_alone(said), _alone(labels))
            said = [said] if isinstance(said, Tensor) else list(said)
        return {name: part.detach().double() for name, part in parts.items()}, said, labels

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **options: Any) -> Any:
        """See `transformers.Trainer.train`; True takes the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise CheckpointError(f"{self.args.output_dir}: expected a checkpoint to go on from, got none")
        if resume_from_checkpoint and not self.args.save_only_model:
            self._check_parts(Path(resume_from_checkpoint))
        if self.args.process_index:  # or processes would drop the same; a checkpoint has the state of each
            torch.manual_seed(self.args.seed + self.args.process_index)
        self._replayed = None
        try:
            return super().train(resume_from_checkpoint, *rest, **options)
        finally:
            self._replayed = None  # graphs give their memory back

    def _check_parts(self, folder: Path) -> None:
        """Raises CheckpointError where a part of a checkpoint is missing: transformers would go on without it."""
        for pattern in ("scheduler.pt", "rng_state*.pth", *(() if self.is_fsdp_enabled else ("optimizer.pt",))):
            if not any(folder.glob(pattern)):
                raise CheckpointError(f"{folder}: expected a whole checkpoint, got none of {pattern}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # what is written over is no checkpoint meanwhile
            path = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", _STATE)
            path.unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the state, which ends a checkpoint, is written next

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not isinstance(model, BertPreTrainedModel):
            super()._save(output_dir, state_dict=state_dict)
        elif self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            model.save_pretrained(folder, state_dict=state_dict)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(str(folder))
            torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if isinstance(model, BertPreTrainedModel) and not self.is_fsdp_enabled:
            self._load_own(resume_from_checkpoint, model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.model, BertPreTrainedModel) and not self.is_fsdp_enabled:
            self._load_own(self.state.best_model_checkpoint, self.model)
        else:
            super()._load_best_model()

    def _load_own(self, folder: str, model: BertPreTrainedModel) -> None:
        report = load_into(model, load_checkpoint(folder), source=folder)
        if report.missing:
            raise CheckpointError(f"{folder}: expected all weights of the model, got none of {report.missing[0]}")


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a run that was written to its end; None where there is none.

    transformers writes a checkpoint's state last: one that a killed run left unfinished has none that can be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = sorted(
        (int(found[1]) for name in names if (found := re.fullmatch(r"checkpoint-(\d+)", name))), reverse=True
    )
    for step in steps:
        path = os.path.join(folder, f"checkpoint-{step}")
        try:
            with open(os.path.join(path, _STATE), encoding="utf-8") as file:
                json.load(file)
        except (OSError, ValueError):
            continue
        return path
    return None


def _total(values: Iterable[Tensor]) -> Tensor:
    first, *others = values
    for value in others:
        first = first + value
    return first


def _times(part: Tensor, weight: Any) -> Tensor:
    return part if isinstance(weight, float | int) and weight == 1 else part * weight


def _on_host(value: Tensor) -> np.ndarray:
    value = value.detach()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()


def _joined(found: list[tuple[int, list[np.ndarray], list[np.ndarray]]], which: int) -> Any:
    """Arrays over all batches in their order: one, a tuple of several, or None."""
    ordered: list[Any] = [one[which] for one in sorted(found, key=lambda one: one[0])]
    if not ordered or not ordered[0]:
        return None
    return _alone([np.concatenate(arrays) for arrays in zip(*ordered, strict=True)])


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _means(everyone: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """The parts of the loss over all labels of all processes, and their sum, "loss"."""
    names = sorted({name for one in everyone for name in one})
    sums = [[one[name] for one in everyone if name in one] for name in names]
    parts = {
        name: sum(total for total, _ in several) / max(sum(count for _, count in several), 1)
        for name, several in zip(names, sums, strict=True)
    }
    return parts and {"loss": sum(parts.values())} | parts


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
