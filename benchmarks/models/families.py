"""Families of transformers' encoders, as benchmarks build them: published vocabularies, at any of BERT's sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kit.bert import VOCAB_SIZE


@dataclass(frozen=True)
class Family:
    """What the classes' names begin with, and what their configuration holds beside sizes.

    shown: in tables. names: of BERT's configuration -> theirs. attention: transformers' fastest for them.
    """

    shown: str
    vocab_size: int = VOCAB_SIZE
    pad_token_id: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    attention: str = "sdpa"

    def configuration(self, kind: type, values: Mapping[str, Any]) -> Any:
        """A configuration from BERT's names."""
        own = {"vocab_size": self.vocab_size, "pad_token_id": self.pad_token_id, **self.options}
        return kind(**{self.names.get(name, name): value for name, value in {**own, **values}.items()})


_BEHIND_PADDING = {"pad_token_id": 1, "options": {"max_position_embeddings": 514, "type_vocab_size": 1}}
FAMILIES: dict[str, Family] = {
    "Bert": Family("BERT"),
    "Roberta": Family("RoBERTa", 50265, **_BEHIND_PADDING),
    "XLMRoberta": Family("XLM-RoBERTa", 250002, **_BEHIND_PADDING),
    "Electra": Family("ELECTRA", options={"embedding_size": 768}),
    "DistilBert": Family(
        "DistilBERT",
        names={
            "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
    ),
    "MPNet": Family("MPNet", 30527, 1, {"max_position_embeddings": 514}, attention="eager"),
    "NomicBert": Family("Nomic BERT", 30528, options={"hidden_act": "silu"}),
    "Gte": Family("GTE", 250048, 1, {"type_vocab_size": 1}),
    "DebertaV2": Family(
        "DeBERTa v3", 128100,
        options={
            "relative_attention": True, "position_buckets": 256, "pos_att_type": "p2c|c2p", "share_att_key": True,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
        },
        attention="eager",
    ),
    "JinaEmbeddingsV3": Family("Jina v3", 250002, 1, {"type_vocab_size": 1}),
}  # fmt: skip


def family_of(kind: str) -> Family:
    """Of a class of transformers, by its name."""
    return next(family for prefix, family in FAMILIES.items() if kind.startswith(prefix))
