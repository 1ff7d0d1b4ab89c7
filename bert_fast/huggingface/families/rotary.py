"""What the families with rotary positions have in common: parts, names and dropout of their layers."""

from bert_fast.huggingface import containers, rotary
from bert_fast.ops.dropout import DropoutSite

PARTS = {
    "*Attention": rotary.FusedRotaryAttention,
    "*Embeddings": rotary.FusedRotaryEmbeddings,
    "*Layer": rotary.FusedRotaryLayer,
    "*MLP": rotary.FusedRotaryMLP,
    "*Pooler": containers.FusedPooler,
}
NAMES = {
    "*Attention": {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "num_attention_heads": "config.num_attention_heads",
    },
    "*Layer": {
        "heads": "self_attn", "attention_dense": "self_attn.o_proj", "attention_dropout": "post_attention_dropout",
        "attention_norm": "post_attention_layernorm", "feed_forward": "mlp", "output_dropout": "post_mlp_dropout",
        "norm": "post_mlp_layernorm",
    },
}  # fmt: skip
GATED = {"activation": "act_fn", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
WORD_HEAD = {"*LMHead": {"LayerNorm": "layer_norm"}}
MISSING = {"*Embeddings": ("position_embeddings",)}
CONTAINERS = frozenset(("embeddings", "self_attn", "mlp", "pooler"))
SITES = {"": DropoutSite.MLP_OUTPUT, "self_attn": DropoutSite.ATTENTION_PROBS, "mlp": DropoutSite.MLP_ACTIVATION}
UNKNOWN_ARGUMENTS = frozenset(("encoder_hidden_states", "encoder_attention_mask"))
