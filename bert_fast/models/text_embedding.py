"""BERT that makes one vector of a text, for search and comparison."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bert_fast.checks import check_count, check_shape
from bert_fast.errors import CheckpointError
from bert_fast.hub import is_hub_name
from bert_fast.models.bert import BertModel, BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.forward import Inputs, takes_model_arguments
from bert_fast.models.outputs import TextEmbeddingOutput
from bert_fast.models.packed import Encoded
from bert_fast.models.pooling import pooled
from bert_fast.models.sentence_folder import (
    TextEmbedding,
    fetch_sentence_folder,
    read_sentence_folder,
    write_sentence_folder,
)
from bert_fast.modules.call import first_rows
from bert_fast.ops.dropout import draw_seed

_OF_TOKENS = ("input_ids", "token_type_ids", "position_ids")


class BertForTextEmbedding(BertPreTrainedModel):
    """BERT whose tokens become one vector for each text; folders are those of sentence-transformers, both ways.

    How they do stands in `config.text_embedding`, a dictionary with the fields of `TextEmbedding`; of a folder without
    it, in sentence-transformers' files, else it is the mean over tokens.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.BertForTextEmbedding(config).eval()
        >>> model(torch.tensor([[1, 2, 3]])).embeddings.shape
        torch.Size([1, 16])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.text_embedding = TextEmbedding.of(getattr(config, "text_embedding", None) or {})
        self.bert = BertModel(config, add_pooling_layer=False)
        self.post_init()

    @classmethod
    def read_config(cls, path: str | os.PathLike[str], **overrides: Any) -> BertConfig:
        """See `PretrainedMixin.read_config`; text_embedding (a mapping): replaces what files say, but where None."""
        own = {
            name: value for name, value in (overrides.pop("text_embedding", None) or {}).items() if value is not None
        }
        config = super().read_config(path, **overrides)
        found = getattr(config, "text_embedding", None)
        try:
            place = fetch_sentence_folder(path, overrides) if is_hub_name(path) else path
            if found is None and os.path.isdir(place):
                folder = read_sentence_folder(place)
                found = None if folder is None else folder.as_dict()
            stored = TextEmbedding.of(found or {}).as_dict()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error
        config.text_embedding = TextEmbedding.of(stored | own).as_dict()
        return config

    def save_pretrained(self, directory: str | os.PathLike[str], *, is_main_process: bool = True, **how: Any) -> Path:
        """See `PretrainedMixin.save_pretrained`; sentence-transformers opens the directory, too."""
        self.config.text_embedding = self.text_embedding.as_dict()
        path = super().save_pretrained(directory, is_main_process=is_main_process, **how)
        if not is_main_process:
            return path
        try:
            write_sentence_folder(path, self.config.hidden_size, self.text_embedding)
        except OSError as error:
            raise CheckpointError(f"{path}: the checkpoint could not be written: {error}") from error
        return path

    @takes_model_arguments
    def forward(self, inputs: Inputs, *, part_size: int | None = None) -> TextEmbeddingOutput | tuple:
        """Embeddings [B, H], fp32; the arguments of `BertModel.forward` and:

        part_size (int): for packed input: so many sequences go through the encoder at a time, and once more, with the
            same dropout, in backward, but for the last ones, which go back first: the activations of one part are in
            memory, whatever the size of the batch. The gradients are, bit for bit, those of the same parts without it.
            One device sync where cu_seqlens is on a GPU. Source: Gao et al. 2021 (arXiv:2101.06983).
        """
        if part_size is not None and (parts := [*_parts(inputs, check_count("part_size", part_size, 1))]):
            *others, last = parts
            return TextEmbeddingOutput(torch.cat([*(self._part(one, again=True) for one in others), self._part(last)]))
        embeddings, encoded = self._embed(inputs)
        return TextEmbeddingOutput(embeddings, encoded.hidden_states, encoded.attentions)

    def _embed(self, inputs: Inputs) -> tuple[Tensor, Encoded]:
        pooling = self.text_embedding.pooling
        encoded = self.bert.encode(**inputs, rows=first_rows if pooling == "cls" else None)
        if pooling == "cls":
            embeddings = encoded.hidden if encoded.hidden.dtype == torch.float64 else encoded.hidden.float()
        else:
            embeddings = pooled(encoded.hidden, encoded.packing.cu_seqlens, pooling)
        if self.text_embedding.normalize:
            embeddings = F.normalize(embeddings, dim=1)
        return embeddings, encoded

    def _part(self, part: Inputs, *, again: bool = False) -> Tensor:
        """The embeddings of a part; again: it is encoded anew in backward, keeping nothing until then."""
        part["dropout_seed"] = draw_seed(part["input_ids"].device) if self.training and self.bert._drops() else None
        if not (again and torch.is_grad_enabled()):
            return self._embed(part)[0]
        made: Tensor = checkpoint(
            lambda: self._embed(part)[0], use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        return made


def _parts(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Packed input, so many sequences at a time."""
    cu_seqlens = inputs.get("cu_seqlens")
    if cu_seqlens is None or inputs["input_ids"] is None:
        raise ValueError("part_size: expected None but for packed input_ids with cu_seqlens, got a number")
    allowed = {*_OF_TOKENS, "cu_seqlens", "max_seqlen", "use_cache"}
    if others := sorted(name for name, value in inputs.items() if value is not None and name not in allowed):
        raise ValueError(f"{others[0]}: expected None beside part_size, got a value")
    check_shape("cu_seqlens", cu_seqlens, ("B + 1",))
    ends = cu_seqlens.tolist()
    for start in range(0, len(ends) - 1, size):
        stop = min(start + size, len(ends) - 1)
        tokens = slice(ends[start], ends[stop])
        lengths = [last - first for first, last in zip(ends[start:stop], ends[start + 1 : stop + 1], strict=True)]
        part = {name: None if inputs.get(name) is None else inputs[name][tokens] for name in _OF_TOKENS}
        yield part | {
            "cu_seqlens": cu_seqlens[start : stop + 1] - ends[start],
            "max_seqlen": max(lengths),
            "use_cache": False,
        }
