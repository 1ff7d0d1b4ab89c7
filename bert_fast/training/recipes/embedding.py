"""One vector per text: tokens in batches without padding, through the encoder, pooled."""

import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_choice, check_count, check_flag, check_integer
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.errors import CheckpointError
from bert_fast.files import path_name
from bert_fast.models import BertForTextEmbedding, BertModel
from bert_fast.models.checkpoint import list_names, load_checkpoint, load_into
from bert_fast.models.pooling import POOLINGS, Pooling, pooled
from bert_fast.models.sentence_folder import TextEmbedding, read_sentence_folder
from bert_fast.models.shapes import check_sizes
from bert_fast.tokenization import RaggedBatch, Tokenizer, load_tokenizer
from bert_fast.training.recipes.families import is_bert, load_other, longest_text

__all__ = ["Embedder", "batches_by_length"]


@dataclass(frozen=True)
class Embedder:
    """Texts to vectors. A vector is that of its text alone, whatever else is in the batch.

    Attributes:
        model: in evaluation mode, of another family than BERT a fused model of transformers; it runs on its device and
            in its dtype, pooling in fp32.
        tokenizer: of the model.
        pooling: over a text's tokens, [CLS] and [SEP] among them: see `models.pooling.pooled`.
        normalize: divide every vector by its Euclidean length.
        max_length: tokens of a text, special tokens counted; what exceeds it is cut. None: as many as the model takes.
        batch_tokens: of a batch; a single text may have more.
        checkpoint: the directory that `from_pretrained` read, which says whose vectors a file holds; None: none.

    Raises: TypeError, ValueError naming the argument, what was expected and what came.
    """

    model: Any
    tokenizer: Tokenizer
    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None
    batch_tokens: int = 16384
    checkpoint: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.model, BertModel) and not hasattr(self.model, "fused_family"):
            raise TypeError(
                f"model: expected a BertModel, or a fused model of transformers, got {type(self.model).__name__}"
            )
        check_tokenizer_kind(self.tokenizer)
        check_choice("pooling", self.pooling, POOLINGS)
        check_flag("normalize", self.normalize)
        object.__setattr__(self, "batch_tokens", check_count("batch_tokens", self.batch_tokens, 1))
        longest = longest_text(self.model)
        if self.max_length is None:
            object.__setattr__(self, "max_length", min(longest, self.tokenizer.model_max_length))
        elif not 2 <= check_integer("max_length", self.max_length) <= longest:
            raise ValueError(f"max_length: expected 2 to {longest} (positions of the model), got {self.max_length}")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> "Embedder":
        """Of a checkpoint directory with its tokenizer; heads that it may have are not used.

        What is not BERT, but of a family that `bert_fast.fuse` takes (docs/families.md), is transformers' model, fused.

        Args:
            path: the directory.
            device: of the model.
            dtype: of the model.
            options: the other attributes; pooling, normalize and max_length that are None, or not there, are the
                model's: see `BertForTextEmbedding`.

        Raises:
            CheckpointError: files are missing or broken, or a parameter of the encoder is not among them.
            ValueError, TypeError: wrong options, or files of the tokenizer.
        """
        name = path_name("path", path)
        _check_place(device, dtype)
        model, how = _bert(name) if is_bert(name) else _of_another_family(name)
        if how["max_length"] is not None:  # what was trained; positions may be fewer
            how["max_length"] = min(how["max_length"], longest_text(model))
        options = options | {name: value for name, value in how.items() if options.get(name) is None}
        embedder = cls(model.to(device, dtype).eval(), load_tokenizer(path), **options)
        return replace(embedder, checkpoint=name)

    def embed(self, texts: Any) -> np.ndarray:
        """The vectors of texts (whatever `encode_ragged` of the tokenizer takes), in their order: float32 [n, H]."""
        return self.embed_tokens(self.tokenize(texts))

    def tokenize(self, texts: Any) -> RaggedBatch:
        """What the model reads of texts; other threads may do this while it computes."""
        return self.tokenizer.encode_ragged(texts, max_length=self.max_length, dtype="int64")

    def embed_tokens(self, ragged: RaggedBatch) -> np.ndarray:
        """The vectors of texts that `tokenize` read, in their order: float32 [n, H]."""
        starts, lengths = ragged.cu_seqlens[:-1], np.diff(ragged.cu_seqlens)
        vectors = np.empty((len(lengths), self.model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for rows in batches_by_length(lengths, self.batch_tokens):
                vectors[rows] = self._vectors(ragged.ids, starts[rows], lengths[rows])
        return vectors

    def _vectors(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Of one batch, [B, H]: text i is ids[starts[i]:starts[i] + lengths[i]]."""
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
        device = self.model.device
        hidden = self.model(
            input_ids=torch.from_numpy(ids[positions + np.repeat(starts, lengths)]).to(device),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)).to(device),
            max_seqlen=int(lengths.max()),
        ).last_hidden_state  # [T, H]
        vectors = pooled(hidden, torch.from_numpy(cu_seqlens).to(device), self.pooling).float()
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()


def _bert(directory: str) -> tuple[BertModel, dict[str, Any]]:
    """A checkpoint's encoder, and how vectors are made by it."""
    config, state_dict = BertForTextEmbedding.read_config(directory), load_checkpoint(directory)
    how = TextEmbedding.of(vars(config)["text_embedding"]).as_dict()
    check_sizes(config, state_dict, model_name="BertModel", source=directory)
    model = BertModel(config, add_pooling_layer=False)
    report = load_into(model, state_dict, source=directory)
    if report.missing:
        raise CheckpointError(f"{directory}: expected the whole encoder, missing: {list_names(report.missing)}")
    return model, how


def _of_another_family(directory: str) -> tuple[Any, dict[str, Any]]:
    """The same of transformers' model, fused."""
    folder = read_sentence_folder(directory)
    return load_other(directory), (TextEmbedding() if folder is None else folder).as_dict()


def _check_place(device: Any, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating-point dtype, got {reprlib.repr(dtype)}")
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device: expected a device, got {reprlib.repr(device)} ({error})") from None


def batches_by_length(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Texts in batches, longest first: those of one are about as long, and memory is asked for once.

    lengths (int [n]): tokens of every text; batch_tokens: of a batch at most, but for single texts that are longer.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = ends[first - 1] if first else 0
        stop = max(int(np.searchsorted(ends, before + batch_tokens, side="right")), first + 1)
        yield order[first:stop]
        first = stop
