"""The functional API: every op is a registered custom op with autograd, runs on any back-end, and explains itself."""

from bert_fast.ops._flops import register_formulas
from bert_fast.ops.attention import attention, attention_padded, attention_with_probabilities
from bert_fast.ops.attention_qkv import attention_qkv
from bert_fast.ops.bias_gelu import bias_activation, bias_gelu
from bert_fast.ops.cross_entropy import cross_entropy
from bert_fast.ops.dropout import DropoutSite, draw_seed, dropout, dropout_site
from bert_fast.ops.dropout_add_layer_norm import dropout_add_layer_norm
from bert_fast.ops.embedding import embedding
from bert_fast.ops.gated_mlp import gated_mlp
from bert_fast.ops.layer_norm import layer_norm
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.ops.linear_gelu import linear_activation, linear_gelu
from bert_fast.ops.linear_int8 import QuantizedWeight, linear_int8, quantize_weight
from bert_fast.ops.maxsim import maxsim
from bert_fast.ops.mlp import mlp
from bert_fast.ops.optimizer import adamw_step, global_norm, lamb_step
from bert_fast.ops.packing import Packing, repad, unpad
from bert_fast.ops.qkv_projection import qkv_projection
from bert_fast.ops.rotary import rotary, rotary_tables
from bert_fast.ops.splade import splade

__all__ = [
    "DropoutSite",
    "Packing",
    "QuantizedWeight",
    "adamw_step",
    "attention",
    "attention_padded",
    "attention_qkv",
    "attention_with_probabilities",
    "bias_activation",
    "bias_gelu",
    "cross_entropy",
    "draw_seed",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_site",
    "embedding",
    "gated_mlp",
    "global_norm",
    "lamb_step",
    "layer_norm",
    "linear",
    "linear_activation",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_int8",
    "maxsim",
    "mlp",
    "qkv_projection",
    "quantize_weight",
    "repad",
    "rotary",
    "rotary_tables",
    "splade",
    "unpad",
]

register_formulas()
