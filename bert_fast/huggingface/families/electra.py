"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): BERT's layers behind narrow embeddings, without a pooler.

The heads are of a generator, which predicts words, and of a discriminator, which finds those that were replaced.
"""

from bert_fast.huggingface import containers, heads, models, token_heads, word_heads
from bert_fast.huggingface.families.bert import CONTAINERS, PARTS, SITES
from bert_fast.huggingface.family import Family

ELECTRA = Family(
    libraries={"transformers.models.electra.modeling_electra": "Electra"},
    inner="electra",
    models={
        "*Model": models.FusedModel,
        "*ForCausalLM": word_heads.FusedForCausalLM,
        "*ForMaskedLM": word_heads.FusedForMaskedLM,
        "*ForMultipleChoice": heads.FusedSummaryHead,
        "*ForPreTraining": token_heads.FusedDiscriminator,
        "*ForQuestionAnswering": token_heads.FusedForQuestionAnswering,
        "*ForSequenceClassification": heads.FusedFirstTokenClassification,
        "*ForTokenClassification": token_heads.FusedForTokenClassification,
    },
    parts={
        **PARTS,
        "*DiscriminatorPredictions": containers.FusedReplacedTokens,
        "*GeneratorPredictions": containers.FusedPredictionTransform,
    },
    names={
        "*Model": {"projection": "embeddings_project?", "vector_size": "config.embedding_size"},
        "*GeneratorPredictions": {"transform_act_fn": "activation"},
    },
    missing={"*Model": ("pooler",)},
    containers=CONTAINERS | {"electra", "discriminator_predictions", "generator_predictions"},
    sites=SITES,
    pads_tuples=False,
    output="BaseModelOutputWithPastAndCrossAttentions",
    words={"transform": "generator_predictions", "decoder": "generator_lm_head"},
    word_parts=("generator_predictions", "generator_lm_head"),
)
