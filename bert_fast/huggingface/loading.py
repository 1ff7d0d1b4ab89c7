"""Checkpoints of other families than BERT, as fused models of transformers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from bert_fast.errors import CheckpointError
from bert_fast.huggingface.families import LIBRARIES
from bert_fast.huggingface.fusing import fuse
from bert_fast.models.checkpoint import list_names

__all__ = ["load_fused", "longest_text"]


def load_fused(directory: str | os.PathLike[str], *, num_labels: int | None = None) -> Any:
    """A model of a checkpoint directory, fused, in fp32 and in evaluation mode.

    Nothing is fetched, and code that came with a checkpoint is not run.

    Args:
        directory: of the checkpoint.
        num_labels: so many classes of texts are wanted; None: the model without a head, and without a pooler, whose
            forward takes packed input as that of `bert_fast.BertModel` does.

    Raises:
        CheckpointError: files are missing or broken, a parameter is not among them, the model is of no family that is
            fused, or it has another number of classes.
    """
    name = os.fspath(directory)
    mapping = transformers.MODEL_MAPPING
    if num_labels is not None:
        mapping = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        if num_labels is not None and config.num_labels != num_labels:
            raise ValueError(f"num_labels: expected {num_labels}, got {config.num_labels}")
        cls: Any = mapping.get(type(config), None)
        if getattr(cls, "__module__", None) not in LIBRARIES:
            known = sorted(library.split(".")[2] for library in LIBRARIES)
            raise ValueError(f"model_type: expected one of {', '.join(known)}, got {config.model_type!r}")
        with _without_progress():
            model, report = cls.from_pretrained(
                name, config=config, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}") from error
    lost = [key for key in report["missing_keys"] if num_labels is not None or not key.startswith("pooler.")]
    lost += [mismatch[0] for mismatch in report["mismatched_keys"]]
    if lost:
        raise CheckpointError(f"{name}: expected the whole model, missing or of other shapes: {list_names(lost)}")
    if num_labels is None and getattr(model, "pooler", None) is not None:
        model.pooler = None  # nobody reads it, and it may be new
    return fuse(model).eval()


def longest_text(model: Any) -> int:
    """How many tokens of a text a fused model takes: its positions, without those that no token gets."""
    longest = int(model.config.max_position_embeddings)
    if model.fused_family.padding_idx is None:
        return longest
    padding_idx = model.get_submodule(model.fused_family.padding_idx.rpartition(".")[0]).padding_idx
    return longest - int(padding_idx) - 1


@contextmanager
def _without_progress() -> Iterator[None]:
    """transformers draws no bar while it loads: what is asked for may be one vector."""
    from transformers.utils import logging

    is_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_on:
            logging.enable_progress_bar()
