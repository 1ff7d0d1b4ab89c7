"""transformers' modules inside a model and a masked-LM head, with the packed computation beside their own.

Called with `call=`, by the fused model on its packed path, they compute as bert_fast's modules do, on the parameters
that they have; called without, they are what they were. What the packed computation reads beyond parameters is looked
up at every call, so that dropout probabilities, activations and layers that are replaced count. Names of parts are
BERT's; where a family calls them otherwise, its record says how.

`site` and `layer_index` are set where a model is fused: they say whose dropout masks these are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from bert_fast.huggingface.fused import Fused, FusedUncalled
from bert_fast.huggingface.padding import padding_of_call
from bert_fast.models.heads import PackedPredictionHead, PackedPredictionTransform
from bert_fast.modules.attention import (
    PackedAttention,
    PackedCrossAttention,
    PackedSelfAttention,
    PackedSelfOutput,
)
from bert_fast.modules.call import Call
from bert_fast.modules.embeddings import PackedEmbeddings
from bert_fast.modules.encoder import PackedEncoder
from bert_fast.modules.flat_layer import PackedFlatLayer, PackedJoinedAttention
from bert_fast.modules.fusable import activated_linear, plain_linear, runs_hooks
from bert_fast.modules.layer import PackedLayer
from bert_fast.modules.mlp import PackedIntermediate, PackedOutput
from bert_fast.modules.originals import is_of
from bert_fast.modules.pooler import PackedPooler
from bert_fast.modules.projections import JoinedMemory
from bert_fast.ops.dropout import dropout_site

# (class, its forward) of modules that compute one of the fused activations -> the activation's name. ACT2FN makes a new
# module at every look-up. A forward that was replaced before this was imported is not of these libraries.
_NAMES = {
    (kind, kind.forward): name
    for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
    if is_of((kind := type(ACT2FN[name])).forward, kind.__module__.partition(".")[0])
}


class FusedContainer(Fused):
    """Chooses between the packed computation and transformers' own."""

    forward_packed: Callable[..., Tensor]  # or none, for those that only hold others

    def forward(self, *args: Any, call: Any = None, **kwargs: Any) -> Any:
        """transformers' own forward, or with `call`, see `modules.call.Call`, the packed one."""
        if call is None:
            return self._theirs(*args, **kwargs)
        return self.forward_packed(*args, call=call, **kwargs)

    def _theirs(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    forward.leads_to_packed = True  # type: ignore[attr-defined]  # `modules.whole_layer` asks


class _Dropping(FusedContainer):
    dropout: nn.Dropout
    dropout_p: Any = property(lambda self: self.dropout.p if self.dropout.training else 0.0)


class FusedJoined(JoinedMemory):
    """Joins memory again where parameters were put in place one by one."""

    def train(self, mode: bool = True) -> Any:
        """As any module's."""
        super().train(mode)  # type: ignore[misc]
        # Where from_pretrained ends and Trainer begins, weights that were put in place one by one meet. Not those that
        # lie in another library's buffer (DeepSpeed, FSDP1), which would go on with the old memory.
        if all(map(_is_alone, self._joined())):
            self._join_memory()
        return self


class _Heads(FusedJoined, _Dropping):
    num_heads: Any = property(lambda self: self.num_attention_heads)
    head_dim: Any = property(lambda self: self.attention_head_size)


class FusedEmbeddings(_Dropping, PackedEmbeddings):
    """Embeddings."""


class FusedEmbeddingsOfTasks(FusedEmbeddings):
    """Embeddings to which the vector of task 0 is added, if there is a table of tasks."""

    task_table: Any

    def forward_packed(
        self, input_ids: Tensor | None, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, *, call: Call,
    ) -> Tensor:  # fmt: skip
        """As `PackedEmbeddings`."""
        if self.task_table is not None:
            words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            task = self.task_table(torch.zeros(1, dtype=torch.int64, device=words.device))
            input_ids, inputs_embeds = None, words + task
        return super().forward_packed(input_ids, token_type_ids, position_ids, inputs_embeds, call=call)


class FusedSelfAttention(_Heads, PackedSelfAttention):
    """Attention of tokens to each other."""


class FusedCrossAttention(_Heads, PackedCrossAttention):
    """Attention to a memory."""


class FusedSelfOutput(_Dropping, PackedSelfOutput):
    """What closes an attention."""


class FusedAttention(FusedContainer, PackedAttention):
    """An attention and what closes it."""


class FusedIntermediate(FusedContainer, PackedIntermediate):
    """The widening half of the MLP."""

    hidden_act: Any = property(lambda self: fused_name(self.intermediate_act_fn))


class FusedOutput(_Dropping, PackedOutput):
    """The MLP and what closes it."""


class FusedBetween(FusedContainer):
    """A module whose output is a hidden state that callers see."""

    def _theirs(self, *args: Any, **kwargs: Any) -> Any:
        output, padding = super()._theirs(*args, **kwargs), padding_of_call.get()
        return output if padding is None or not padding.between else padding.zeroed(output)


class _Layers(FusedContainer):
    def _theirs(self, *args: Any, **kwargs: Any) -> Any:
        padding = padding_of_call.get()
        if padding is not None and padding.between:  # the layers' first argument, which is a hidden state too
            args = tuple(map(padding.zeroed, args[:1])) + args[1:]
            kwargs = {k: padding.zeroed(v) if k in ("hidden_states", "x") else v for k, v in kwargs.items()}
        return super()._theirs(*args, **kwargs)


class FusedLayer(FusedBetween, PackedLayer):
    """A layer."""


class FusedEncoder(_Layers, PackedEncoder):
    """The stack of layers."""


class FusedPooler(FusedContainer, PackedPooler):
    """The pooled sequence."""

    def _theirs(self, hidden_states: Tensor) -> Any:
        padding = padding_of_call.get()
        return super()._theirs(hidden_states if padding is None else padding.first(hidden_states))


class FusedPredictionTransform(FusedContainer, PackedPredictionTransform):
    """What comes before the scores of words."""

    hidden_act: Any = property(lambda self: fused_name(self.transform_act_fn))


class FusedPredictionHead(FusedContainer, PackedPredictionHead):
    """Scores of words."""


class FusedWordHead(FusedContainer, PackedPredictionHead, PackedPredictionTransform):
    """Scores of words, in one module with what comes before them."""

    hidden_act = "gelu"

    def transform(self, x: Tensor, *, call: Any = None) -> Tensor:
        """[M, H] to [M, H]."""
        return PackedPredictionTransform.forward_packed(self, x, call=call)


class FusedReplacedTokens(FusedContainer):
    """Scores of tokens that were replaced."""

    dense: nn.Linear
    activation: Any
    dense_prediction: nn.Linear

    def forward_packed(self, x: Tensor, *, call: Any = None) -> Tensor:
        """[T, H] to [T]."""
        x = activated_linear(x, self.dense, fused_name(self.activation))
        return plain_linear(x, self.dense_prediction).squeeze(-1)


class FusedJoinedAttention(_Dropping, PackedJoinedAttention):
    """An attention, with what closes it."""


class FusedBiasedEncoder(_Layers, PackedEncoder):
    """A stack of layers whose scores share a bias, which transformers' own code makes of distances."""

    compute_position_bias: Callable[[Tensor], Tensor]

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """As `PackedEncoder`, with the bias in the call."""
        packing = call.packing
        length = packing.max_seqlen if packing.padded_shape is None else packing.padded_shape[1]
        bias = self.compute_position_bias(x.new_empty(1, length, 0))  # [1, A, S, S]
        return super().forward_packed(x, memory, call=replace(call, bias=bias))


class FusedFlatLayer(FusedBetween, PackedFlatLayer):
    """A layer of fewer modules."""


class FusedFeedForward(_Dropping, FusedUncalled):
    """The linear layers of an MLP, which a flat layer closes."""

    hidden_act: Any = property(lambda self: fused_name(self.activation))


class FusedHolder(FusedContainer):
    """A module that only holds others."""


def _is_alone(layer: nn.Module) -> bool:
    """Whether every parameter of a layer is all that its storage holds."""
    return all(
        type(p) is nn.Parameter and p.untyped_storage().nbytes() == p.nbytes for p in layer.parameters(recurse=False)
    )


def fused_name(activation: Any) -> Any:
    """The name of the activation that a module computes, for the fused op; the module where it must be called."""
    if runs_hooks(activation):
        return activation
    kind = type(activation)
    return _NAMES.get((kind, kind.forward), activation)


def set_sites(encoder: Any) -> None:
    """Tells the containers in a fused encoder which layer they are of, and which dropout masks are theirs."""
    sites = encoder.fused_family.sites
    for index, layer in enumerate(encoder.layer):
        for name, module in layer.named_modules():
            if name in sites and isinstance(module, FusedContainer):
                vars(module).update(layer_index=index, site=dropout_site(sites[name], index))


def clear_sites(container: nn.Module) -> None:
    """Removes what `set_sites` left."""
    for name in ("layer_index", "site"):
        vars(container).pop(name, None)
