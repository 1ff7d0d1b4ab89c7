"""Run by test_transformers4.py in a process whose transformers is version 4; not a test itself.

Usage: python run_transformers4.py RESULTS.json, which becomes {what was tried: "packed", "slow" or an error message}.
"""

import copy
import json
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from bert_fast.huggingface import fuse, patch_transformers, unfuse, why_not
from bert_fast.testing.parity import Case, evaluate, randomize
from tests.huggingface import families, test_padding
from tests.parity.cases import TRANSFORMERS_4, TRANSFORMERS_5
from tests.parity.comparing import check, in_fp64

NAMES = (
    "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction",
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification", "BertForQuestionAnswering",
)  # fmt: skip


# Of families whose layers are BERT's.
OF_FAMILIES = ("mask holes", "vectors for words", "types and positions", "masked lm", "sequence classes",
               "multiple choice", "token classes", "question answering", "language model")  # fmt: skip
SUMMARIES = ("last", "mean")
_WITHOUT_SDPA = ("Data2VecText", "DebertaV2", "Electra", "Ernie", "MPNet", "RoFormer")


def _model(name: str, config: dict[str, Any], attention: str = "eager") -> Any:
    cls = getattr(transformers, name)
    model = cls(families.configuration(cls, **config, attn_implementation=attention)).eval()
    randomize(model)
    return model


def _path(model: Any, tensors: dict[str, Any], flags: dict[str, Any]) -> str:
    inputs = {key: value for key, value in {**tensors, **flags}.items() if "label" not in key}
    return "slow" if why_not(model.base_model, **inputs) else "packed"


def parity(case: Case, prefix: str = "Bert") -> str:
    """Every output and gradient; the path that the call took."""
    untouched = families.theirs(prefix, case, attn_implementation="eager")
    randomize(untouched)
    fused = fuse(copy.deepcopy(untouched))
    tensors = case.tensors(torch.float32)
    path = _path(fused, tensors, case.flags)
    theirs = evaluate(untouched, case, tensors)
    truth = evaluate(untouched.double(), case, in_fp64(tensors))
    check(case, "padded", torch.float32, fused, theirs, truth)
    return path


def parity_of_family(named: tuple[str, Case]) -> str:
    return parity(named[1], named[0])


def swapping(name: str) -> str:
    """fuse, a copy, a pickle and unfuse, with the attention class that sdpa brings."""
    case = Case(name, model=name)
    config = {**case.full_config(), "num_labels": 2}
    untouched = _model(name, config, "eager" if name.startswith(_WITHOUT_SDPA) else "sdpa")
    classes = [type(module) for module in untouched.modules()]
    model = fuse(copy.deepcopy(untouched))
    tensors = case.tensors(torch.float32)
    expected = model(**tensors)
    path = _path(model, tensors, {})
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is type(model) and torch.equal(again(**tensors)[0], expected[0])
    for return_dict in (True, False):
        wanted = untouched(**tensors, return_dict=return_dict, output_hidden_states=True)
        got = model(**tensors, return_dict=return_dict, output_hidden_states=True)
        assert type(got) is type(wanted) and len(got) == len(wanted)
        assert [value is None for value in got] == [value is None for value in wanted]
    assert [type(module) for module in unfuse(model).modules()] == classes
    return path


def patching(_: str) -> str:
    with patch_transformers():
        model = transformers.BertForMaskedLM(transformers.BertConfig(**Case("").full_config())).eval()
    assert why_not(model) == []
    return "packed"


def pruning(_: str) -> str:
    """Heads that are removed from a fused model."""
    case = Case("pruning", config={"num_attention_heads": 4})
    models = [_model("BertModel", case.full_config()) for _ in range(2)]
    fuse(models[0])
    for model in models:
        model.prune_heads({0: [1], 1: [0, 2]})
        model.double()  # version 4 makes the smaller layers in fp32
    tensors = case.tensors(torch.float64)
    outputs = [evaluate(model, case, tensors) for model in models]
    for key, value in outputs[1].items():
        torch.testing.assert_close(outputs[0][key], value, msg=lambda text, key=key: f"{key}: {text}")
    return _path(models[0], tensors, {})


def padding(name: str) -> str:
    """Heads give the same on transformers' own path, and summaries what transformers gives."""
    if name in SUMMARIES:
        test_padding.test_a_summary_is_what_transformers_makes_of_padding(name)
    else:
        test_padding.test_every_path_gives_the_same(name)
    return "packed"


def main(results_path: str) -> None:
    tried: list[tuple[str, Callable[[Any], str], Any]] = [
        *((f"parity: {case.name}", parity, case) for case in TRANSFORMERS_4),
        *((f"swapping: {name}", swapping, name) for name in NAMES),
        *(
            (f"swapping: {prefix}{head}", swapping, f"{prefix}{head}")
            for prefix in families.CONFIG
            for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
        ),
        *(
            (f"parity: {prefix} {case.name}", parity_of_family, (prefix, case))
            for prefix in families.CONFIG
            for case in families.cases(prefix, (case for case in TRANSFORMERS_5 if case.name in OF_FAMILIES))
            if prefix not in ("DistilBert", "RoFormer") or "position_ids" not in case.inputs  # of version 5
        ),
        *(
            (f"padding: {name}", padding, name)
            for name in (*test_padding.NAMES, *SUMMARIES)
            if not name.endswith(("Model", "ForNextSentencePrediction"))
        ),
        ("patching", patching, ""),
        ("pruning", pruning, ""),
    ]
    results = {"version": transformers.__version__}
    for name, attempt, argument in tried:
        try:
            results[name] = attempt(argument)
        except Exception:  # one failure must not hide the others; the test shows the message
            results[name] = traceback.format_exc()[-2000:]
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
