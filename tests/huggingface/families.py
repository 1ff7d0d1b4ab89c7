"""The families in tests: how they are called, and which of their classes plays the part of one of BERT's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import transformers

from bert_fast.testing.parity import Case

# What the names of a family's classes begin with -> its configuration where it is not that of a Case.
CONFIG: dict[str, dict[str, Any]] = {
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "Camembert": {"pad_token_id": 2},
    "Electra": {"embedding_size": 20},
}
ALIKE = ("XLMRoberta", "Camembert")  # their code is that of another family, under other names
_SAME = {"BertLMHeadModel": "BertForCausalLM"}
# Calls of classes that BERT has nothing like -> the class.
_OWN = {"replaced tokens": "ElectraForPreTraining", "replaced tokens, no mask": "ElectraForPreTraining"}
OWN_CASES = {
    "Electra": [
        Case("replaced tokens", model="BertForTokenClassification", labels=("tokens",), mask="holes"),
        Case("replaced tokens, no mask", model="BertForTokenClassification", labels=("tokens",), mask="none"),
        Case("as wide as the layers", config={"embedding_size": 36}),
        Case("summary of means", "BertForMultipleChoice", {"summary_type": "mean"}, mask="none"),
    ]
}


def class_name(prefix: str, bert: str) -> str:
    """The name of a family's class for one of BERT's."""
    return _SAME.get(bert, bert).replace("Bert", prefix, 1) if prefix != "Bert" else bert


def cases(prefix: str, of_bert: Iterable[Case]) -> list[Case]:
    """Those of BERT's calls for which a family has a class, with its configuration, and calls of its own.

    Pre-training by replaced tokens is none of BERT's two tasks; where positions count from padding's id, there is one.
    """
    fitting = [
        case
        for case in of_bert
        if hasattr(transformers, class_name(prefix, case.model))
        and case.model != "BertForPreTraining"
        and not ("pad_token_id" in CONFIG[prefix] and "pad_token_id" in case.config)
    ]
    return [replace(case, config={**CONFIG[prefix], **case.config}) for case in [*fitting, *OWN_CASES.get(prefix, [])]]


def theirs(prefix: str, case: Case, **config: Any) -> Any:
    """A model of transformers for a case, in evaluation."""
    cls = getattr(transformers, _OWN.get(case.name, class_name(prefix, case.model)))
    return cls(cls.config_class(**{**case.full_config(), **config})).eval()
