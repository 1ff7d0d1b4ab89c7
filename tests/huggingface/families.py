"""The families in tests: how they are called, and which of their classes plays the part of one of BERT's."""

from dataclasses import replace
from typing import Any

import transformers

from bert_fast.testing.parity import Case

# What the names of a family's classes begin with -> its configuration where it is not that of a Case.
CONFIG: dict[str, dict[str, Any]] = {
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "Camembert": {"pad_token_id": 2},
}
ALIKE = ("XLMRoberta", "Camembert")  # their code is that of another family, under other names
_SAME = {"BertLMHeadModel": "BertForCausalLM"}


def class_name(prefix: str, bert: str) -> str:
    """The name of a family's class for one of BERT's."""
    return _SAME.get(bert, bert).replace("Bert", prefix, 1) if prefix != "Bert" else bert


def has(prefix: str, bert: str) -> bool:
    """Whether a family has such a class; pre-training by replaced tokens is none of BERT's two tasks."""
    return bert != "BertForPreTraining" and hasattr(transformers, class_name(prefix, bert))


def of_family(prefix: str, case: Case) -> Case:
    """The same call with a family's configuration."""
    return replace(case, config={**case.config, **CONFIG.get(prefix, {})})


def theirs(prefix: str, case: Case, **config: Any) -> Any:
    """A model of transformers for a case, in evaluation."""
    cls = getattr(transformers, class_name(prefix, case.model))
    return cls(cls.config_class(**{**of_family(prefix, case).full_config(), **config})).eval()
