"""GTE (Zhang et al. 2024, arXiv:2407.19669): rotary positions, and a gated MLP that drops inside."""

from bert_fast.huggingface import containers, heads, token_heads, word_heads
from bert_fast.huggingface.families import rotary
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.rotary import FusedRotaryModel

GTE = Family(
    libraries={"transformers.models.gte.modeling_gte": "Gte"},
    inner="gte",
    models={
        "*Model": FusedRotaryModel,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForSequenceClassification": heads.FusedForSequenceClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={**rotary.PARTS, "*LMHead": containers.FusedWordHead},
    names={**rotary.NAMES, **rotary.WORD_HEAD, "*MLP": rotary.GATED},
    missing=rotary.MISSING,
    containers=rotary.CONTAINERS | {"gte", "lm_head"},
    sites=rotary.SITES,
    output="BaseModelOutputWithPooling",
    words={"head": "lm_head"},
    word_parts=("lm_head",),
    passes_positions=False,
    unknown_arguments=rotary.UNKNOWN_ARGUMENTS,
)
