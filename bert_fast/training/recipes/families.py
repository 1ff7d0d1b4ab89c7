"""Checkpoints that are not BERT, where a command takes them: models of transformers, fused."""

from pathlib import Path
from typing import Any

from bert_fast.errors import CheckpointError
from bert_fast.models.bert import BertPreTrainedModel
from bert_fast.models.json_file import read_json

__all__ = ["is_bert", "load_other", "longest_text"]


def is_bert(directory: str) -> bool:
    """Whether a checkpoint directory is BERT's, as far as its config.json says."""
    file = Path(directory) / "config.json"
    values = read_json(file) if file.is_file() else {}
    return not isinstance(values, dict) or values.get("model_type") in (None, "", "bert")


def load_other(directory: str, num_labels: int | None = None) -> Any:
    """See `bert_fast.huggingface.loading.load_fused`; raises CheckpointError where transformers is not there, too."""
    try:
        from bert_fast.huggingface.loading import load_fused
    except ImportError as error:
        raise CheckpointError(f"{directory}: a model that is not BERT needs transformers ({error})") from error
    return load_fused(directory, num_labels=num_labels)


def longest_text(model: Any) -> int:
    """How many tokens of a text a model takes, ours or a fused one without a head."""
    if isinstance(model, BertPreTrainedModel):
        return int(model.config.max_position_embeddings)
    from bert_fast.huggingface.loading import longest_text

    return longest_text(model)
