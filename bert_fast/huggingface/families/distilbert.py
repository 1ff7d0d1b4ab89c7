"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT's computation in fewer modules, without types and pooler."""

from bert_fast.huggingface import containers, heads, models, token_heads, word_heads
from bert_fast.huggingface.family import Family
from bert_fast.ops.dropout import DropoutSite

_HEADS = {"query": "q_lin", "key": "k_lin", "value": "v_lin", "num_attention_heads": "n_heads"}

DISTILBERT = Family(
    libraries={"transformers.models.distilbert.modeling_distilbert": "DistilBert"},
    inner="distilbert",
    models={
        "*Model": models.FusedModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedFirstTokenHead,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        "DistilBertSdpaAttention": containers.FusedSelfAttention,
        "DistilBertSelfAttention": containers.FusedSelfAttention,
        "Embeddings": containers.FusedEmbeddings,
        "FFN": containers.FusedFeedForward,
        "MultiHeadSelfAttention": containers.FusedSelfAttention,
        "Transformer": containers.FusedEncoder,
        "TransformerBlock": containers.FusedFlatLayer,
    },
    names={
        "*Model": {"encoder": "transformer"},
        "DistilBertSdpaAttention": _HEADS,
        "DistilBertSelfAttention": _HEADS,
        "MultiHeadSelfAttention": _HEADS,
        "TransformerBlock": {
            "heads": "attention", "attention_dense": "attention.out_lin", "attention_norm": "sa_layer_norm",
            "feed_forward": "ffn", "up": "ffn.lin1", "down": "ffn.lin2", "norm": "output_layer_norm",
        },
    },
    missing={"*Model": ("pooler",), "Embeddings": ("token_type_embeddings",)},
    containers=frozenset(("distilbert", "embeddings", "transformer", "attention", "ffn")),
    sites={"attention": DropoutSite.ATTENTION_PROBS, "ffn": DropoutSite.MLP_OUTPUT},
    pads_tuples=False,
    passes_positions=False,
    output="BaseModelOutput",
    words={
        "dense": "vocab_transform", "activation": "activation", "LayerNorm": "vocab_layer_norm",
        "decoder": "vocab_projector",
    },
    word_parts=("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    attention_dropout="attention_dropout",
    unknown_arguments=frozenset(("token_type_ids", "encoder_hidden_states", "encoder_attention_mask")),
)  # fmt: skip
