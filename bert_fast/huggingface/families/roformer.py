"""RoFormer (Su et al. 2021, arXiv:2104.09864): BERT's layers, whose queries and keys are turned by position.

Embeddings may be narrower than layers. There is no pooler; heads read the first token.
"""

from bert_fast.huggingface import containers, heads, rotary, token_heads, word_heads
from bert_fast.huggingface.families.bert import CONTAINERS, PARTS, SITES
from bert_fast.huggingface.family import Family

ROFORMER = Family(
    libraries={"transformers.models.roformer.modeling_roformer": "RoFormer"},
    inner="roformer",
    models={
        "*Model": rotary.FusedRoFormerModel,
        "*ForCausalLM": word_heads.FusedForCausalLM,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedSummaryHead,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        **{name: computing for name, computing in PARTS.items() if name != "*CrossAttention"},
        "*Embeddings": rotary.FusedRotaryEmbeddings,
        "*Encoder": rotary.FusedRoFormerEncoder,
        "*LMPredictionHead": containers.FusedPredictionHead,
        "*OnlyMLMHead": containers.FusedHolder,
        "*PredictionHeadTransform": containers.FusedPredictionTransform,
        "*SelfAttention": rotary.FusedRoFormerAttention,
    },
    names={"*Model": {"projection": "embeddings_project?", "vector_size": "config.embedding_size"}},
    missing={"*Model": ("pooler",), "*Embeddings": ("position_embeddings",)},
    containers=CONTAINERS | {"roformer", "cls", "predictions", "transform"},
    sites=SITES,
    output="BaseModelOutputWithPastAndCrossAttentions",
    pads_tuples=False,
    passes_positions=False,
    words={"head": "cls.predictions"},
    word_parts=("cls",),
    # Attention to a memory is of the same class as attention of tokens to each other, and is left to transformers.
    unknown_arguments=frozenset(("encoder_hidden_states", "encoder_attention_mask")),
)
