"""BERT (Devlin et al. 2019, arXiv:1810.04805), whose names and order are those of the computation itself."""

from bert_fast.huggingface import containers, heads, models, token_heads, word_heads
from bert_fast.huggingface.family import Family
from bert_fast.ops.dropout import DropoutSite

# What families whose layers are BERT's have in common with it.
PARTS = {
    "*Attention": containers.FusedAttention,
    "*CrossAttention": containers.FusedCrossAttention,
    "*Embeddings": containers.FusedEmbeddings,
    "*Encoder": containers.FusedEncoder,
    "*Intermediate": containers.FusedIntermediate,
    "*Layer": containers.FusedLayer,
    "*Output": containers.FusedOutput,
    "*SelfAttention": containers.FusedSelfAttention,
    "*SelfOutput": containers.FusedSelfOutput,
}
CONTAINERS = frozenset(
    ("embeddings", "encoder", "pooler", "attention", "crossattention", "self", "output", "intermediate")
)
SITES = {
    "attention.self": DropoutSite.ATTENTION_PROBS,
    "attention.output": DropoutSite.ATTENTION_OUTPUT,
    "crossattention.self": DropoutSite.CROSS_ATTENTION_PROBS,
    "crossattention.output": DropoutSite.CROSS_ATTENTION_OUTPUT,
    "output": DropoutSite.MLP_OUTPUT,
}

BERT = Family(
    libraries={"transformers.models.bert.modeling_bert": "Bert"},
    inner="bert",
    models={
        "*Model": models.FusedModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedPooledHead,
        "*ForNextSentencePrediction": heads.FusedPooledHead,
        "*ForPreTraining": word_heads.FusedForPreTraining,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedForSequenceClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
        "*LMHeadModel": word_heads.FusedForCausalLM,
    },
    parts={
        **PARTS,
        "*SdpaSelfAttention": containers.FusedSelfAttention,
        "*LMPredictionHead": containers.FusedPredictionHead,
        "*OnlyMLMHead": containers.FusedHolder,
        "*Pooler": containers.FusedPooler,
        "*PreTrainingHeads": containers.FusedHolder,
        "*PredictionHeadTransform": containers.FusedPredictionTransform,
    },
    containers=CONTAINERS | {"bert", "cls", "predictions", "transform"},
    sites=SITES,
    output="BaseModelOutputWithPoolingAndCrossAttentions",
    words={"head": "cls.predictions"},
    word_parts=("cls",),
)
