"""The families in tests: how they are called, and which of their classes plays the part of one of BERT's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import transformers

from bert_fast.testing.parity import Case

# What the names of a family's classes begin with -> its configuration where it is not that of a Case.
_CONFIG: dict[str, dict[str, Any]] = {
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "Camembert": {"pad_token_id": 2},
    "DistilBert": {},
    "Electra": {"embedding_size": 20},
    "MPNet": {"pad_token_id": 1},
    "Gte": {"type_vocab_size": 2},
    "JinaEmbeddingsV3": {"type_vocab_size": 2},
    "NomicBert": {"pad_token_id": 0},
    "Data2VecText": {"pad_token_id": 1},
    "Ernie": {"use_task_id": True},
    "RoFormer": {"embedding_size": 20, "summary_type": "first"},
    "DebertaV2": {
        "type_vocab_size": 0, "relative_attention": True, "position_buckets": 4, "pos_att_type": "c2p|p2c",
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip
CONFIG = {prefix: config for prefix, config in _CONFIG.items() if hasattr(transformers, f"{prefix}Model")}
# Where a family's configuration calls something otherwise.
_NAMES = {
    "DistilBert": {
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }
}  # fmt: skip
ALIKE = ("XLMRoberta", "Camembert", "Data2VecText")  # their code is that of another family, under other names
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


ENCODERS = ("DebertaV2", "DistilBert", "MPNet")  # without types
ROTARY = ("Gte", "JinaEmbeddingsV3", "NomicBert")
ONLY_EAGER = ("DebertaV2", "MPNet", "RoFormer")  # whose attention is computed in one way
NO_DECODERS = (*ENCODERS, *ROTARY)


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
        and not case.config.get("is_decoder", False) & (prefix in NO_DECODERS)
        and not (prefix == "DebertaV2" and case.mask == "4d")  # which it does not take
        and not ("pad_token_id" in CONFIG[prefix] and "pad_token_id" in case.config)
    ]
    return [
        replace(
            case,
            config={**CONFIG[prefix], **case.config},
            inputs=tuple(name for name in case.inputs if name != "token_type_ids" or prefix not in ENCODERS),
        )
        for case in [*fitting, *OWN_CASES.get(prefix, [])]
    ]


def theirs(prefix: str, case: Case, **config: Any) -> Any:
    """A model of transformers for a case, in evaluation."""
    cls = getattr(transformers, _OWN.get(case.name, class_name(prefix, case.model)))
    return cls(configuration(cls, **{**case.full_config(), **config})).eval()


def configuration(cls: Any, **values: Any) -> Any:
    """A class's configuration from BERT's names."""
    names = _NAMES.get(cls.__name__.split("For")[0].removesuffix("Model"), {})
    return cls.config_class(**{names.get(name, name): value for name, value in values.items()})


def checkpoint_layers(model: Any, arguments: dict[str, Any] | None = None) -> None:
    """Has transformers run layers again in backward, by the name that the installed version gives it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)
