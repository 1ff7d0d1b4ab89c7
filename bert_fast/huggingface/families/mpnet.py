"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's layers with a bias of distances, which all of them share.

Positions are counted as in RoBERTa, there are no types, and heads pass on no arguments but their own.
"""

from bert_fast.huggingface import containers, heads, models, token_heads, word_heads
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.flattened import OFFSETS
from bert_fast.ops.dropout import DropoutSite

MPNET = Family(
    libraries={"transformers.models.mpnet.modeling_mpnet": "MPNet"},
    inner="mpnet",
    models={
        "*Model": models.FusedModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedPooledHead,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        "*Attention": containers.FusedJoinedAttention,
        "*Embeddings": containers.FusedEmbeddings,
        "*Encoder": containers.FusedBiasedEncoder,
        "*Intermediate": containers.FusedIntermediate,
        "*LMHead": containers.FusedWordHead,
        "*Layer": containers.FusedLayer,
        "*Output": containers.FusedOutput,
        "*Pooler": containers.FusedPooler,
        "*SelfAttention": containers.FusedSelfAttention,
    },
    names={
        "*Attention": {"heads": "attn", "dense": "attn.o"},
        "*LMHead": {"LayerNorm": "layer_norm"},
        "*SelfAttention": {"query": "q", "key": "k", "value": "v"},
    },
    missing={"*Embeddings": ("token_type_embeddings",)},
    containers=frozenset(
        ("mpnet", "embeddings", "encoder", "pooler", "attention", "attn", "intermediate", "output", "lm_head")
    ),
    sites={
        "attention.attn": DropoutSite.ATTENTION_PROBS,
        "attention": DropoutSite.ATTENTION_OUTPUT,
        "output": DropoutSite.MLP_OUTPUT,
    },
    output="BaseModelOutputWithPooling",
    words={"head": "lm_head"},
    word_parts=("lm_head",),
    padding_idx="embeddings.padding_idx",
    passes_positions=False,
    pads_tuples=True,
    unknown_arguments=frozenset(("token_type_ids", "encoder_hidden_states", "encoder_attention_mask", *OFFSETS)),
)
