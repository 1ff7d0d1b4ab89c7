"""`Trainer`: transformers' Trainer on batches without padding, whose size is a number of tokens."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
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
from bert_fast.training.checkpoints import RUN, STATE, check_checkpoint, examples_digest, last_checkpoint
from bert_fast.training.loading import PLACE, Features, batch_loader
from bert_fast.training.losses import alone, joined, label_counts, loss_parts, means, on_host
from bert_fast.training.replaying import Replayed, check_replayable, run_budgets

_WEIGHTS = "loss_weights"  # the entry of a batch that says what its loss counts in its step
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # what `AdamW` computes
# Arguments of transformers that its own loaders, losses and loops look at, with the values that may stand there.
_ONLY: dict[str, tuple[Any, ...]] = {
    "dataloader_drop_last": (False,), "auto_find_batch_size": (False,), "batch_eval_metrics": (False,),
    "eval_do_concat_batches": (True,), "bf16_full_eval": (False,), "fp16_full_eval": (False,),
    "include_for_metrics": (None, []), "average_tokens_across_devices": (True,), "neftune_noise_alpha": (None,),
    "label_smoothing_factor": (0,), "train_sampling_strategy": ("random", "sequential"), "deepspeed": (None,),
    "parallelism_config": (None,),
}  # fmt: skip


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

    Args:
        model: of `bert_fast.models`, or transformers', fused or not.
        args: `TrainingArguments`.
        data_collator: makes a batch of features; None: `PackedCollator`.
        options: those of `transformers.Trainer`. compute_metrics gets predictions and labels over all examples in their
            order: [n, ...] an example, [T, ...] for what belongs to tokens, None where there are none.

    Raises:
        TypeError, ValueError: the message names the argument.
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
        if options.get("compute_loss_func") is not None:
            raise ValueError("compute_loss_func: expected None, as batches are weighted by their labels here")
        for name, allowed in _ONLY.items():
            got, wanted = getattr(args, name, allowed[0]), " or ".join(map(repr, allowed))
            if got not in allowed:
                raise ValueError(f"{name}: expected {wanted}, as nothing else is done here, got {got!r}")
        if args.device.type == "cpu":
            bound_kernel_cache()
        super().__init__(model, args, data_collator or PackedCollator(), **options)
        self.model_accepts_loss_kwargs = True  # or weighted losses would be divided by the batches of a step
        self._clips_in_step = False
        self._run: dict[str, Any] = {}
        self._replayed: Replayed | None = None
        self._batches: Batches | None = None
        # By the id of a data set, which is kept so that its id stays its own.
        self._sources: dict[int, tuple[Any, Features]] = {}
        names = " ".join(cls.__name__ for cls in type(self.model).__mro__)
        self._predicts_next = "LMHead" in names or "CausalLM" in names
        if args.graphs:
            check_replayable(self.model)

    # Batches

    def _get_dataloader(self, dataset: Any, description: str, *_: Any, is_training: bool = False, **__: Any) -> Any:
        """transformers' one way to a loader: of examples to train on (shuffled), or to judge by (in their order)."""
        source = self._source(dataset, description)
        args, limits = self.args, self.args.batch_limits(is_training)
        if not len(source.lengths(0)):
            raise ValueError(f"{description.lower()}: expected examples, got none")
        if not is_training and "max_tokens" in limits:  # an example that is longer is a batch of its own
            limits["max_tokens"] = max(limits["max_tokens"], int(source.lengths(0).max()))
        is_shuffled = is_training and args.train_sampling_strategy != "sequential"
        batches = Batches(source, shuffle=is_shuffled, seed=self._data_seed, **limits)
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
            in_order=args.dataloader_in_order,
        )

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _source(self, dataset: Any, description: str) -> Source:
        if isinstance(dataset, Source):
            return dataset
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                f"{description.lower()}: expected a Source, or a data set with a length and indices, got "
                f"{type(dataset).__name__}"
            )
        if id(dataset) not in self._sources:
            columns = getattr(dataset, "column_names", None) or ()
            lengths = dataset["length"] if "length" in columns else None
            kept = self._remove_unused_columns(dataset, description=description) if columns else dataset
            self._sources[id(dataset)] = dataset, Features(kept, self.data_collator, lengths)
        return self._sources[id(dataset)][1]

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of a step in this process, each with its share of the step's labels."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        counts = []
        for batch in batches:
            found, place = label_counts(batch, self._predicts_next), batch.pop(PLACE)
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
        return batches, 1  # not None: losses are weighted already

    def _prepare_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, PackedBatch):
            return inputs.to(self.args.device, non_blocking=True)
        return super()._prepare_inputs(inputs)

    # Steps

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch, weighted by its labels among those of the step."""
        weights = inputs.pop(_WEIGHTS, {})
        outputs = model(**inputs)
        parts = loss_parts(outputs, inputs)
        loss = reduce(operator.add, (_times(part, weights.get(name, 1)) for name, part in parts.items()))
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward; replayed as a CUDA graph where the arguments ask for it."""
        if not self.args.graphs:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
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
        is_ours = str(getattr(args.optim, "value", args.optim)) in _OPTIMIZERS
        if args.lamb and not is_ours:
            raise ValueError(f"lamb: expected False with optim={args.optim}, got True")
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
        self._check_finite(loss=logs.get("loss", 0.0), train_loss=logs.get("train_loss", 0.0))

    def _check_finite(self, **values: float) -> None:
        for name, value in values.items():
            if not math.isfinite(value) and not self.args.logging_nan_inf_filter:
                kept = last_checkpoint(self.args.output_dir) or "no checkpoint was written yet"
                raise TrainingError(
                    f"{name}: expected a number, got {value} up to step {self.state.global_step}; a smaller "
                    f"learning_rate than {self.args.learning_rate:g}, or more warm-up, may help. Last checkpoint: "
                    f"{kept}"
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
        is_loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", [])
        model = self._model_for_evaluation()
        self.callback_handler.eval_dataloader = dataloader
        found: list[tuple[int, list[np.ndarray], list[np.ndarray]]] = []
        sums: dict[str, Any] = {}
        for batch in dataloader:
            place, counts = batch.pop(PLACE), label_counts(batch, self._predicts_next)
            parts, said, labels = self._asked(model, self._prepare_inputs(batch), counts, ignore_keys)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if place.is_spare:
                continue
            for part, value in parts.items():
                total, count = sums.get(part, (0.0, 0))
                sums[part] = total + value * counts[part], count + counts[part]
            if not is_loss_only:
                found.append((place.turn, [on_host(one) for one in said], [on_host(one) for one in labels]))
        sums = {part: (float(total), count) for part, (total, count) in sums.items()}
        found, everyone = gather_object(found), gather_object([sums])
        predictions, label_ids = joined(found, 1), joined(found, 2)
        metrics = {}
        if label_ids is not None and self.compute_metrics is not None:
            metrics = self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=label_ids))
        metrics, prefix = means(everyone) | denumpify_detensorize(metrics), f"{metric_key_prefix}_"
        metrics = {prefix + name.removeprefix(prefix): value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, label_ids, metrics, len(dataloader.dataset))

    def _model_for_evaluation(self) -> nn.Module:
        """The model with autocast, also where nothing was trained yet."""
        model: nn.Module = self.model
        if not self.accelerator._models:
            model = self.accelerator.prepare_model(model, evaluation_mode=not self.is_fsdp_enabled)
            self.model_wrapped = model
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        return model.eval()

    def _asked(
        self, model: nn.Module, batch: Any, counts: Mapping[str, int], ignore_keys: Iterable[str]
    ) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """(parts of the loss that have labels, what the model says, the labels) of a batch."""
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**batch)
            if not isinstance(outputs, Mapping):
                outputs = dict(zip((("loss",) if counts else ()) + tuple(range(len(outputs))), outputs, strict=False))
            parts = loss_parts(outputs, batch) if counts and outputs.get("loss") is not None else {}
        parts = {name: part for name, part in parts.items() if counts.get(name)}
        said: Any = [
            value
            for name, value in outputs.items()
            if name != "loss" and name not in ignore_keys and isinstance(value, Tensor)
        ]
        labels = [batch[name] for name in self.label_names if batch.get(name) is not None]
        if self.preprocess_logits_for_metrics is not None:
            said = self.preprocess_logits_for_metrics(alone(said), alone(labels) if labels else None)
            said = [said] if isinstance(said, Tensor) else list(said)
        return {name: part.detach().double() for name, part in parts.items()}, said, labels

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **options: Any) -> Any:
        """See `transformers.Trainer.train`; True takes the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise CheckpointError(f"{self.args.output_dir}: expected a checkpoint to go on from, got none")
        self._run = self._describe_run()
        if resume_from_checkpoint:
            check_checkpoint(Path(resume_from_checkpoint), self._run, self.is_fsdp_enabled)
        self._replayed = None
        try:
            return super().train(resume_from_checkpoint, *rest, **options)
        finally:
            self._replayed = None  # graphs give their memory back

    def _inner_training_loop(self, *positional: Any, **named: Any) -> Any:
        if self.args.process_index:  # or processes would drop the same; a checkpoint has the state of each
            torch.manual_seed(self.args.seed + self.args.process_index)
        return super()._inner_training_loop(*positional, **named)

    def _describe_run(self) -> dict[str, Any]:
        """What decides the bits of a run beside its model: another one must not go on from its checkpoints."""
        args, source = self.args, self._source(self.train_dataset, "Training")
        labels = getattr(self.model.config, "id2label", None) or {}
        return {
            "train_dataset": examples_digest(source),
            "labels": [str(labels[number]) for number in sorted(labels)],
            "batches": args.batch_limits(is_training=True),
            "batches of a step": args.gradient_accumulation_steps * self.accelerator.num_processes,
            "data_seed": self._data_seed,
            "learning_rate": args.learning_rate,
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        are_finite = [parameter.isfinite().all() for parameter in self.model.parameters()]
        self._check_finite(weights=0.0 if bool(torch.stack(are_finite).all()) else math.nan)
        self.state.stateful_callbacks[RUN] = self._run
        if self.args.should_save:  # what is written over is no checkpoint meanwhile
            path = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", STATE)
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
        model, folder = self.model if model is None else model, resume_from_checkpoint
        if not isinstance(model, BertPreTrainedModel) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(folder, model)
            return
        report = load_into(model, load_checkpoint(folder), source=folder)
        if report.missing:
            raise CheckpointError(f"{folder}: expected all weights of the model, got none of {report.missing[0]}")

    def _load_best_model(self) -> None:
        if isinstance(self.model, BertPreTrainedModel) and not self.is_fsdp_enabled:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()


def _times(part: Tensor, weight: Any) -> Tensor:
    return part if isinstance(weight, float | int) and weight == 1 else part * weight
