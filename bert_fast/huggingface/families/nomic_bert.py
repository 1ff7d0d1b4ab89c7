"""Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613): rotary positions, a gated MLP, no biases in layers."""

from bert_fast.huggingface import containers, heads, token_heads, word_heads
from bert_fast.huggingface.families import rotary
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.rotary import FusedRotaryModel

NOMIC_BERT = Family(
    libraries={"transformers.models.nomic_bert.modeling_nomic_bert": "NomicBert"},
    inner="nomic_bert",
    models={
        "*Model": FusedRotaryModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForSequenceClassification": heads.FusedForSequenceClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        **rotary.PARTS,
        "*LMPredictionHead": containers.FusedPredictionHead,
        "*OnlyMLMHead": containers.FusedHolder,
        "*PredictionHeadTransform": containers.FusedPredictionTransform,
    },
    names={
        **rotary.NAMES,
        "*MLP": rotary.GATED,
        "*PredictionHeadTransform": {"LayerNorm": "layer_norm"},
    },
    missing=rotary.MISSING,
    containers=rotary.CONTAINERS | {"nomic_bert", "cls", "predictions", "transform"},
    sites=rotary.SITES,
    output="BaseModelOutputWithPooling",
    words={"head": "cls.predictions"},
    word_parts=("cls",),
    passes_positions=True,
    unknown_arguments=rotary.UNKNOWN_ARGUMENTS,
)
