"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), XLM-RoBERTa and CamemBERT: BERT's layers under other heads.

Positions are counted from padding_idx + 1, of tokens that are no padding; sequence classes read the first token without
a pooler; what predicts words is one module.
"""

from bert_fast.huggingface import containers, heads, models, token_heads, word_heads
from bert_fast.huggingface.families.bert import CONTAINERS, PARTS, SITES
from bert_fast.huggingface.family import Family

ROBERTA = Family(
    libraries={
        "transformers.models.camembert.modeling_camembert": "Camembert",
        "transformers.models.roberta.modeling_roberta": "Roberta",
        "transformers.models.xlm_roberta.modeling_xlm_roberta": "XLMRoberta",
    },
    inner="roberta",
    models={
        "*Model": models.FusedModel,
        "*ForCausalLM": word_heads.FusedForCausalLM,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedPooledHead,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        **PARTS,
        "*LMHead": containers.FusedWordHead,
        "*Pooler": containers.FusedPooler,
        "*SdpaSelfAttention": containers.FusedSelfAttention,
    },
    names={"*LMHead": {"LayerNorm": "layer_norm"}},
    containers=CONTAINERS | {"roberta", "lm_head"},
    sites=SITES,
    output="BaseModelOutputWithPoolingAndCrossAttentions",
    words={"head": "lm_head"},
    word_parts=("lm_head",),
    padding_idx="embeddings.padding_idx",
)
