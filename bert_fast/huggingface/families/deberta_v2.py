"""DeBERTa, version 2 and 3 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543).

Scores hold keys and queries of distances. There is no pooler; heads read the first token.
"""

from collections.abc import Mapping

from bert_fast.huggingface import containers, disentangled, heads, token_heads
from bert_fast.huggingface.families.bert import PARTS
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.flattened import OFFSETS
from bert_fast.ops.dropout import DropoutSite

_HEADS: Mapping[str, str] = {
    "query": "query_proj", "key": "key_proj", "value": "value_proj", "position_key": "pos_key_proj?",
    "position_query": "pos_query_proj?", "position_dropout": "pos_dropout?",
}  # fmt: skip

DEBERTA_V2 = Family(
    libraries={"transformers.models.deberta_v2.modeling_deberta_v2": "DebertaV2"},
    inner="deberta",
    models={
        "*Model": disentangled.FusedDisentangledModel,
        "*ForMaskedLM": disentangled.FusedDisentangledForMaskedLM,
        "*ForMultipleChoice": heads.FusedFirstTokenHead,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        **{name: PARTS[name] for name in ("*Attention", "*Intermediate", "*Layer", "*Output", "*SelfOutput")},
        "*Embeddings": disentangled.FusedDisentangledEmbeddings,
        "*Encoder": disentangled.FusedDisentangledEncoder,
        "DisentangledSelfAttention": disentangled.FusedDisentangledAttention,
        "Legacy*LMPredictionHead": containers.FusedPredictionHead,
        "Legacy*OnlyMLMHead": containers.FusedHolder,
        "Legacy*PredictionHeadTransform": containers.FusedPredictionTransform,
    },
    names={"*Embeddings": {"projection": "embed_proj"}, "DisentangledSelfAttention": _HEADS},
    missing={"*Model": ("pooler",)},
    containers=frozenset(
        (
            "deberta", "embeddings", "encoder", "attention", "self", "output", "intermediate", "conv", "cls",
            "predictions", "transform",
        )
    ),
    sites={
        "attention.self": DropoutSite.ATTENTION_PROBS,
        "attention.output": DropoutSite.ATTENTION_OUTPUT,
        "output": DropoutSite.MLP_OUTPUT,
    },
    output="BaseModelOutput",
    pads_tuples=False,
    passes_positions=False,
    unknown_arguments=frozenset(("encoder_hidden_states", "encoder_attention_mask", *OFFSETS)),
)  # fmt: skip
