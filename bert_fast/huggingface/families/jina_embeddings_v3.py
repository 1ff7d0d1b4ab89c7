"""Jina v3 (Sturua et al. 2024, arXiv:2409.10173): RoBERTa's heads on layers with rotary positions."""

from bert_fast.huggingface import containers, heads, token_heads, word_heads
from bert_fast.huggingface.families import rotary
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.rotary import FusedRotaryModel

JINA_EMBEDDINGS_V3 = Family(
    libraries={"transformers.models.jina_embeddings_v3.modeling_jina_embeddings_v3": "JinaEmbeddingsV3"},
    inner="roberta",
    models={
        "*Model": FusedRotaryModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={**rotary.PARTS, "*LMHead": containers.FusedWordHead},
    names={
        **rotary.NAMES,
        **rotary.WORD_HEAD,
        "*MLP": {"activation": "activation_fn", "up": "fc1", "down": "fc2"},
    },
    missing=rotary.MISSING,
    containers=rotary.CONTAINERS | {"roberta", "lm_head"},
    sites=rotary.SITES,
    output="BaseModelOutputWithPooling",
    words={"head": "lm_head"},
    word_parts=("lm_head",),
    passes_positions=False,
    unknown_arguments=rotary.UNKNOWN_ARGUMENTS,
)
