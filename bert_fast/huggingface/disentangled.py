"""transformers' models with disentangled attention: DeBERTa, version 2 and 3."""

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.huggingface.containers import FusedEmbeddings, FusedEncoder, FusedSelfAttention, fused_name
from bert_fast.huggingface.models import FusedModel
from bert_fast.huggingface.word_heads import FusedForMaskedLM
from bert_fast.models.heads import PackedPredictionHead, PackedPredictionTransform
from bert_fast.modules.call import Call
from bert_fast.modules.disentangled import PackedDisentangledAttention, RelativeEmbeddings
from bert_fast.ops.packing import Packing


class FusedDisentangledEmbeddings(FusedEmbeddings):
    """Embeddings, with or without positions, as wide as the layers or projected to that."""

    position_embedding_type: Any = property(
        lambda self: "disentangled" if self.position_embeddings is None else "absolute"
    )


class FusedDisentangledAttention(FusedSelfAttention, PackedDisentangledAttention):
    """Attention of tokens to each other and to their distances."""

    pos_att_type: list[str]
    position_terms: Any = property(lambda self: [term for term in ("c2p", "p2c") if term in self.pos_att_type])
    shares_projections: Any = property(lambda self: self.share_att_key)


class FusedDisentangledEncoder(FusedEncoder):
    """A stack of layers that share embeddings of distances."""

    relative_attention: bool
    position_buckets: int
    max_relative_positions: int
    norm_rel_ebd: list[str]
    rel_embeddings: nn.Embedding
    LayerNorm: nn.LayerNorm

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """As `PackedEncoder`, with the embeddings in the call."""
        if self.relative_attention:
            call = replace(call, relative=self._relative(call.packing, x.device))
        return super().forward_packed(x, memory, call=call)

    def _relative(self, packing: Packing, device: torch.device) -> RelativeEmbeddings:
        weight, norm = self.rel_embeddings.weight, self.LayerNorm if "layer_norm" in self.norm_rel_ebd else None
        num_rows = 2 * (self.position_buckets if self.position_buckets > 0 else self.max_relative_positions)
        bounds = num_rows, self.position_buckets, self.max_relative_positions
        theirs = sys.modules[self.fused_original.__module__]
        length = packing.max_seqlen if packing.padded_shape is None else packing.padded_shape[1]
        if torch.compiler.is_compiling():
            return RelativeEmbeddings(weight, norm, _rows(length, *bounds, theirs).to(device), 0, num_rows)
        if packing.padded_shape is None:
            length = min(length, packing.num_tokens)  # max_seqlen may be any number
        return RelativeEmbeddings(weight, norm, *_rows_on(device, torch.get_default_dtype(), length, *bounds, theirs))


def _rows(length: int, num_rows: int, num_buckets: int, max_distance: int, theirs: Any) -> Tensor:
    """The row of the embeddings for distances -(length - 1) .. length - 1, int64, as their code computes it."""
    length = torch.sym_max(length, 1)
    distances = torch.arange(1 - length, length)
    if num_buckets > 0 and max_distance > 0:
        distances = theirs.make_log_bucket_position(distances, num_buckets, max_distance).long()
    return (distances + num_rows // 2).clamp(0, num_rows - 1)


@functools.lru_cache(maxsize=64)
def _rows_on(device: torch.device, _dtype: torch.dtype, *arguments: Any) -> tuple[Tensor, int, int]:
    """(rows, the first and one past the last of those in use); _dtype: in which their code computes logarithms."""
    with torch.inference_mode(False):  # what is kept may be saved for backward later
        rows = _rows(*arguments)
        return rows.to(device), int(rows[0]), int(rows[-1]) + 1


class FusedDisentangledModel(FusedModel):
    """A model without a head."""

    z_steps: int
    has_position_table: Any = property(lambda self: self.embeddings.position_embeddings is not None)
    reads_positions: Any = has_position_table

    def reasons_of_model(self) -> Iterator[str]:
        """Why this model needs transformers' code."""
        if self.z_steps > 1:
            yield f"z_steps: {self.z_steps}, which run the last layer again"

    def _drops(self) -> bool:
        modules: Any = self.modules()  # type: ignore[attr-defined]
        parts = [one for one in modules if isinstance(one, PackedDisentangledAttention)]
        return super()._drops() or any(one.position_dropout_p for one in parts)


class _WordHead(PackedPredictionHead, PackedPredictionTransform):
    """Scores of words as products with the embeddings of words, by the parts of transformers' head."""

    def __init__(self, head: Any, words: nn.Module) -> None:
        self.dense, self.LayerNorm, self.hidden_act = head.dense, head.LayerNorm, fused_name(head.transform_act_fn)
        self._words: Any = words
        self._bias = head.bias

    def transform(self, x: Tensor, *, call: Any = None) -> Tensor:
        """[M, H] to [M, H]."""
        return PackedPredictionTransform.forward_packed(self, x, call=call)

    def scoring(self) -> tuple[Tensor, Tensor]:
        """Weight and bias that make scores."""
        return self._words.weight, self._bias

    __call__ = PackedPredictionHead.forward_packed


class FusedDisentangledForMaskedLM(FusedForMaskedLM):
    """Scores of words, by either of the two heads that a configuration chooses from."""

    legacy: bool
    cls: Any
    lm_predictions: Any

    def head(self) -> Any:
        """As `FusedForMaskedLM`."""
        if self.legacy:
            return self.cls.predictions
        return _WordHead(self.lm_predictions.lm_head, self.inner.get_input_embeddings())

    def word_modules(self) -> tuple[Any, ...]:
        """As `FusedForMaskedLM`."""
        return (self.cls if self.legacy else self.lm_predictions,)
