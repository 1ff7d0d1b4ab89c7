"""transformers' common tests of models for families whose own files of tests a source distribution leaves out.

`--common Ernie` runs the mixin of `tests/test_modeling_common.py` on all classes of the family, small and random. What
that file imports from tests that are not there is empty: tests of exporters and of generation.
"""

import importlib.util
import sys
import unittest
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_HEADS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForPreTraining", "ForNextSentencePrediction",
)  # fmt: skip
# Modules of theirs that a source distribution leaves out -> what is imported from them.
_ABSENT = {
    "tests.exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "tests.generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "tests.utils.test_configuration_utils": {"config_common_kwargs": {}},
}
_SIZES: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, hidden_act="gelu",
    hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, max_position_embeddings=512, type_vocab_size=2,
    initializer_range=0.02,
)  # fmt: skip
_BATCH, _LENGTH = 13, 7


def write(folder: Path, prefixes: Iterable[str]) -> list[Path]:
    """A file of tests for each prefix of a family's classes."""
    files = []
    for prefix in prefixes:
        files.append(folder / f"test_modeling_{prefix.lower()}.py")
        files[-1].write_text(f"from {__name__} import cases_of\n\nModelTest = cases_of({prefix!r})\n", "utf-8")
    return files


def cases_of(prefix: str) -> type:
    """The tests of all classes of a family that transformers has."""
    for name, values in _ABSENT.items():
        parent = name.rpartition(".")[0]
        if parent not in sys.modules and importlib.util.find_spec(parent) is None:
            sys.modules[parent] = package = ModuleType(parent)
            package.__path__ = []
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(values)
    import transformers

    theirs: Any = importlib.import_module("tests.test_modeling_common")
    configuration = getattr(transformers, f"{prefix}Config")

    def inputs() -> tuple[Any, dict[str, Any]]:
        ids = theirs.ids_tensor([_BATCH, _LENGTH], _SIZES["vocab_size"])
        types = theirs.ids_tensor([_BATCH, _LENGTH], _SIZES["type_vocab_size"])
        mask = theirs.random_attention_mask([_BATCH, _LENGTH])
        # Ids from 2 on: 0 and 1 are padding, by which some families count positions.
        return configuration(**_SIZES), {"input_ids": ids.clamp(min=2), "token_type_ids": types, "attention_mask": mask}

    def set_up(self: Any) -> None:
        self.model_tester = SimpleNamespace(
            parent=self, batch_size=_BATCH, seq_length=_LENGTH, encoder_seq_length=_LENGTH, key_length=_LENGTH,
            is_training=True, num_labels=3, num_choices=4, hidden_size=_SIZES["hidden_size"],
            num_hidden_layers=_SIZES["num_hidden_layers"], num_attention_heads=_SIZES["num_attention_heads"],
            get_config=lambda: configuration(**_SIZES), prepare_config_and_inputs_for_common=inputs,
        )  # fmt: skip

    def prepared(self: Any, inputs: dict[str, Any], cls: type, return_labels: bool = False) -> dict[str, Any]:
        made = dict(theirs.ModelTesterMixin._prepare_for_class(self, inputs, cls, return_labels))
        if return_labels and cls.__name__.endswith("ForPreTraining"):  # the mixin has no labels for it
            made["labels"], made["next_sentence_label"] = made["input_ids"], made["token_type_ids"][:, 0]
        return made

    classes = [getattr(transformers, prefix + head, None) for head in _HEADS]
    attributes = {
        "all_model_classes": tuple(cls for cls in classes if cls is not None),
        "all_generative_model_classes": (),
        "setUp": set_up,
        "_prepare_for_class": prepared,
    }
    return type(f"{prefix}Test", (theirs.ModelTesterMixin, unittest.TestCase), attributes)
