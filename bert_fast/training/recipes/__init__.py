"""Whole runs from plain settings: what the command line calls, and what a script may call as well."""

from bert_fast.training.recipes.build import SIZES, make_config
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.embedding_files import embed_files
from bert_fast.training.recipes.inference import TrainedModel
from bert_fast.training.recipes.mining import Limits, Mined, mine, read_corpus
from bert_fast.training.recipes.reranking import CrossEncoder
from bert_fast.training.recipes.runs import plan_text, run
from bert_fast.training.recipes.search import Index, search
from bert_fast.training.recipes.settings import Settings, SettingsError

__all__ = [
    "SIZES",
    "CrossEncoder",
    "Embedder",
    "Index",
    "Limits",
    "Mined",
    "Settings",
    "SettingsError",
    "TrainedModel",
    "embed_files",
    "make_config",
    "mine",
    "plan_text",
    "read_corpus",
    "run",
    "search",
]
