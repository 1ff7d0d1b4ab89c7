"""The families of transformers' models that `fuse` knows: a file each, and a line here."""

from bert_fast.huggingface.families.bert import BERT
from bert_fast.huggingface.families.data2vec_text import DATA2VEC_TEXT
from bert_fast.huggingface.families.deberta_v2 import DEBERTA_V2
from bert_fast.huggingface.families.distilbert import DISTILBERT
from bert_fast.huggingface.families.electra import ELECTRA
from bert_fast.huggingface.families.ernie import ERNIE
from bert_fast.huggingface.families.gte import GTE
from bert_fast.huggingface.families.jina_embeddings_v3 import JINA_EMBEDDINGS_V3
from bert_fast.huggingface.families.mpnet import MPNET
from bert_fast.huggingface.families.nomic_bert import NOMIC_BERT
from bert_fast.huggingface.families.roberta import ROBERTA
from bert_fast.huggingface.families.roformer import ROFORMER
from bert_fast.huggingface.family import Family

__all__ = ["LIBRARIES", "TABLE", "model_names"]

TABLE: tuple[Family, ...] = (
    BERT, DATA2VEC_TEXT, DEBERTA_V2, DISTILBERT, ELECTRA, ERNIE, GTE, JINA_EMBEDDINGS_V3, MPNET, NOMIC_BERT, ROBERTA,
    ROFORMER,
)  # fmt: skip

# Modules of transformers -> the family whose classes they hold.
LIBRARIES: dict[str, Family] = {library: family for family in TABLE for library in family.libraries}


def model_names() -> str:
    """What transformers calls the models without a head."""
    names = [f"{prefix}Model" for family in TABLE for prefix in family.libraries.values()]
    return " or ".join((", ".join(names[:-1]), names[-1])) if names[1:] else names[0]
