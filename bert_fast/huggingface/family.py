"""What a family of transformers' models is: the record that its file in `families/` fills in.

Everything that differs between families is here, as data; what computes reads it. So a family is a file with one
record, and its line in `families.TABLE`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import transformers

from bert_fast.ops.dropout import DropoutSite

IS_VERSION_4 = int(transformers.__version__.split(".")[0]) < 5
# Classes that only one version has, as records name them.
ONLY_IN_VERSION_4 = ("*SdpaSelfAttention", "DistilBertSdpaAttention", "MultiHeadSelfAttention")
ONLY_IN_VERSION_5 = ("*CrossAttention", "DistilBertSelfAttention")


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    libraries: modules of transformers that hold it -> how the names of its classes begin there, which `*`
        stands for below.
    inner: the attribute by which a model with a head holds the model without.
    models: classes of whole models -> what computes in their place; parts: those of the modules inside.
    names: of such a class, attributes that the computation reads -> what theirs are called, with dots for those of a
        child, and with "?" at the end where they may be missing, and then are None.
    missing: attributes that the computation reads, and theirs do not have: they are None.
    containers: names of the modules inside that must be fused, beside all members of lists.
    sites: modules within a layer -> what they drop.
    words: where a model that predicts words has what makes scores of hidden states: under "head", or its parts, by the
        names of `models.heads`, "transform" (or its parts) and "decoder". word_parts: those children of the model which
        then are not called by transformers' forward.
    padding_idx: where the model keeps the id of padding, if positions count from behind it, and tokens that are no
        padding only; None: they count columns from 0.
    output: the class, of `transformers.modeling_outputs`, that a model without a head returns.
    attention_dropout: what the configuration calls the probability.
    passes_positions: whether position_ids reach an attention of transformers, which may find flattened texts by them.
    pads_tuples: whether what a model returns as a tuple holds None for a pooled sequence that is not there.
    unknown_arguments: of `reasons.ARGUMENTS`, those that its forward lacks: calls with them run transformers' code.
    """

    libraries: Mapping[str, str]
    inner: str
    models: Mapping[str, type]
    parts: Mapping[str, type]
    containers: frozenset[str]
    sites: Mapping[str, DropoutSite]
    output: str
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    word_parts: tuple[str, ...] = ()
    padding_idx: str | None = None
    attention_dropout: str = "attention_probs_dropout_prob"
    unknown_arguments: frozenset[str] = frozenset()
    passes_positions: bool = not IS_VERSION_4
    pads_tuples: bool = IS_VERSION_4
