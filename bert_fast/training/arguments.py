"""`TrainingArguments`: transformers', and what packed batches and this library's kernels add to them."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from bert_fast.checks import check_count, check_flag
from bert_fast.graphs import check_device

_GRAPHS_WITHOUT = ("fp16", "fsdp", "gradient_checkpointing", "activation_checkpointing")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` and the fields below; `HfArgumentParser` makes flags of all of them.

    One default differs: logging_nan_inf_filter is False, as it would wait for the device after every batch. A loss that
    is no number ends the run where it is logged.

    Raises:
        TypeError, ValueError: the message names the field.
        BackendError: graphs are asked for where there are none.
    """

    per_device_train_batch_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a batch at most, filled by packing examples of all lengths; takes the place of "
            "per_device_train_batch_size."
        },
    )
    per_device_eval_batch_tokens: int | None = field(
        default=16384,
        metadata={
            "help": "Tokens of a batch in evaluation and prediction; takes the place of per_device_eval_batch_size."
        },
    )
    lamb: bool = field(
        default=False, metadata={"help": "Train by LAMB (large batches) in place of AdamW, with AdamW's betas and eps."}
    )
    graphs: bool = field(
        default=False, metadata={"help": "Replay forward and backward as CUDA graphs, one for each size of batch."}
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Leave losses that are no numbers out of the log. It waits for the device after each batch."},
    )

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_tokens", "per_device_eval_batch_tokens"):
            if getattr(self, name) is not None:
                setattr(self, name, check_count(name, getattr(self, name), 1))
        for name in ("lamb", "graphs"):
            check_flag(name, getattr(self, name))
        # Of several processes without accelerators each would take itself for a run of its own.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if getattr(self, "ddp_find_unused_parameters") is None:  # noqa: B009
            self.ddp_find_unused_parameters = False  # as for transformers' own models
        super().__post_init__()
        if self.graphs:
            for name in _GRAPHS_WITHOUT:
                if getattr(self, name, None):
                    raise ValueError(f"graphs: expected False with {name}, got True")
            check_device("graphs", self.device)
            if self.world_size > 1:
                raise ValueError(f"graphs: expected False for {self.world_size} processes, got True")

    def batch_limits(self, is_training: bool) -> dict[str, Any]:
        """batch_size or max_tokens of `Batches`."""
        if is_training:
            tokens, size = self.per_device_train_batch_tokens, self.per_device_train_batch_size
        else:
            tokens, size = self.per_device_eval_batch_tokens, self.per_device_eval_batch_size
        return {"batch_size": size} if tokens is None else {"max_tokens": tokens}
