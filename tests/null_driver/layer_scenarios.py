"""What the tests of programs of layers run over the null driver, as `scenarios.py`: models at random batches.

Every batch runs three times: op by op, by programs in Python, and by programs as they run (in C++, where there is the
extension). All three must launch the same kernels with the same grids, threads, shared memory and parameters, but for
addresses, of which the last four bits count. BERT_FAST_ALL_LAYERS=1: all models, 50 batches of each, in minutes.
"""

import copy
import os
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import CLASSES, PRECISIONS, SIZES, inputs_of, make_step

NUM_BATCHES = 50
_MOST_SEQUENCES, _MOST_TOKENS = 12, 4096
# Of a word of 8 bytes, the upper half where it is an address of Linux's on x86-64; no number here is as large.
_ADDRESSES = range(0x5000, 0x8000)
_FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "MPNet")
_ANOTHER = "queries by another module"
_KINDS = ("bert_fast", "fused")
_FEW = (
    ("BertForPreTraining", "autocast", "bert_fast"), ("BertForTokenClassification", "bf16", "bert_fast"),
    ("BertForQuestionAnswering", "fp32", "bert_fast"), ("BertLMHeadModel", "autocast", "bert_fast"),
    ("BertForMaskedLM", "autocast", "fused"), ("BertForNextSentencePrediction", "bf16", "fused"),
    ("BertModel", "fp32", "fused"),
)  # fmt: skip
_Run = Callable[[dict[str, Tensor]], None]  # both passes of a batch


def _words(parameters: bytes) -> tuple[int, ...]:
    """Bytes of parameters as words, addresses without where they point to."""
    whole = len(parameters) // 8 * 8
    words = [int.from_bytes(parameters[i : i + 8], "little") for i in range(0, whole, 8)]
    masked = [word % 16 - 16 if word >> 32 in _ADDRESSES else word for word in words]
    return *masked, int.from_bytes(parameters[whole:], "little")


def _both_passes(model: Any, precision: str) -> _Run:
    model = model.to(torch.bfloat16) if precision == "bf16" else model

    def run(inputs: dict[str, Tensor]) -> None:
        memory = inputs.get("encoder_hidden_states")
        if memory is not None:
            inputs = inputs | {"encoder_hidden_states": memory.to(model.dtype)}
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            output = model(**inputs)[0]
        output.backward(torch.ones_like(output))
        model.zero_grad()

    return run


def _of_family(prefix: str) -> Any:
    """A fused masked-language model of a family."""
    import transformers

    import bert_fast
    from tests.huggingface.families import CONFIG, configuration

    cls = getattr(transformers, f"{prefix}ForMaskedLM")
    own = {} if prefix == "Bert" else CONFIG[prefix]
    # Room for positions that count from the padding's id.
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 516} | own
    return bert_fast.fuse(cls(configuration(cls, **sizes))).train()


def _decoder(has_memory: bool) -> Any:
    """A fused decoder, with cross-attention or without."""
    import transformers

    import bert_fast

    config = transformers.BertConfig(**SIZES, num_hidden_layers=2, is_decoder=True, add_cross_attention=has_memory)
    return bert_fast.fuse(transformers.BertLMHeadModel(config)).train()


class _Another(torch.nn.Module):
    """A module in the place of a linear layer, as an adapter is."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _with_another_query() -> Any:
    model = make_step("BertForSequenceClassification", "bf16", kind="fused").model
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = _Another(layer.attention.self.query)
    return model


def _models(is_all: bool) -> dict[str, tuple[str, _Run]]:
    """By name: the class whose batches it takes, and both its passes."""
    found: dict[str, tuple[str, _Run]] = {}
    all_heads = [(name, precision, kind) for name in CLASSES for precision in PRECISIONS for kind in _KINDS]
    for name, precision, kind in all_heads if is_all else _FEW:
        model = make_step(name, precision, kind=kind).model
        found[f"{name} {precision} {kind}"] = name, _both_passes(model, precision)
    found[_ANOTHER] = "BertForSequenceClassification", _both_passes(_with_another_query(), "bf16")
    if not is_all:
        return found
    for prefix in _FAMILIES:
        for precision in PRECISIONS:
            found[f"{prefix} {precision}"] = prefix, _both_passes(_of_family(prefix), precision)
    for precision in PRECISIONS:
        found[f"causal {precision}"] = "BertLMHeadModel", _both_passes(_decoder(False), precision)
        found[f"cross-attention {precision}"] = "cross-attention", _both_passes(_decoder(True), precision)
    return found


def _batch(kind: str, rng: random.Random) -> dict[str, Tensor]:
    """A padded batch of random lengths, from one token to thousands."""
    longest = rng.choice((1, 3, 20, 33, 64, 65, 128, 129, 300, 512))
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, _MOST_SEQUENCES) - 1)] + [longest]
    while sum(lengths) > _MOST_TOKENS:
        lengths.pop(0)
    rng.shuffle(lengths)
    if kind in CLASSES:
        inputs = inputs_of(kind, tuple(lengths))
        if kind == "BertForQuestionAnswering":
            inputs["end_positions"] = inputs["start_positions"]
        return inputs
    inputs = inputs_of("BertForMaskedLM", tuple(lengths))
    if kind in ("DistilBert", "MPNet"):
        del inputs["token_type_ids"]
    if kind == "cross-attention":
        num_keys = rng.choice((1, 7, 40, 130))
        inputs["encoder_hidden_states"] = torch.randn(len(lengths), num_keys, SIZES["hidden_size"])
        ends = torch.tensor([rng.randint(1, num_keys) for _ in lengths])
        inputs["encoder_attention_mask"] = (torch.arange(num_keys) < ends[:, None]).long()
    return inputs


def layers_by_programs(driver: NullDriver) -> dict[str, Any]:
    """Launches that differ between programs and ops; programs of each kind of call, by model; launches compared."""
    import bert_fast  # noqa: F401  with the answers of a GPU
    from bert_fast.triton import encoder_layer
    from bert_fast.triton._program import Launch
    from bert_fast.triton._programs import Programs, _Runner

    is_all = os.environ.get("BERT_FAST_ALL_LAYERS") == "1"
    tables = encoder_layer._of_model, encoder_layer._forward, encoder_layer._backward
    rng, wrong, counts = random.Random(11), list[str](), dict[str, list[int]]()
    compared, replayed, untraced, in_extension = 0, 0, 0, [0, 0]
    driver.note_parameters()

    def launched(run: _Run, inputs: dict[str, Tensor]) -> list[tuple[Any, ...]]:
        torch.manual_seed(1)
        driver.reset()
        run(copy.copy(inputs))
        return [
            (one.kernel, one.grid, one.threads, one.shared_bytes, _words(one.parameters)) for one in driver.launches()
        ]

    calls = [0]
    run_program = _Runner.run

    def counted(runner: Any, *given: Any) -> Any:
        made = run_program(runner, *given)
        calls[0] += made is not None
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = _models(is_all)
        for name, (kind, run) in models.items():
            for table in tables:
                table.forget()
            for number in range(NUM_BATCHES if is_all else 4):
                inputs = _batch(kind, rng)
                with mock.patch.object(Programs, "run", return_value=None):
                    expected = launched(run, inputs)
                if name == _ANOTHER:  # its ops make sums over rows one by one, which programs make together
                    expected = [one for one in expected if "column_sums" not in one[0]]
                with mock.patch.object(_Runner, "run", _Runner.run_here):
                    here = launched(run, inputs)
                with mock.patch.object(_Runner, "run", counted):
                    found = launched(run, inputs)
                compared += len(expected)
                for label, one in (("in Python", here), ("as they run", found)):
                    if name == _ANOTHER:
                        one = [launch for launch in one if "column_sums" not in launch[0]]
                    if one != expected:
                        wrong.append(f"{name}, batch {number}, programs {label}: {_difference(one, expected)}")
            replayed += calls[0]
            calls[0] = 0
            kinds = [kind.runners for table in tables for kind in table._kinds.values()]
            untraced += sum(runners is None or not all(one._is_one for one in runners) for runners in kinds)
            for one in (one for runners in kinds for one in runners or ()):
                if any(isinstance(step.what, Launch) for step in one.program.steps):  # there may be no rows
                    in_extension[one._native is not None] += 1
            counts[name] = sorted(len(runners or ()) for runners in kinds)
    return {
        "wrong": wrong[:3], "num wrong": len(wrong), "programs": counts, "compared": compared, "replayed": replayed,
        "untraced": untraced, "in extension": in_extension, "refusals": driver.refusals,
    }  # fmt: skip


def _difference(found: list[Any], expected: list[Any]) -> str:
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"launch {place} is {one}, expected {other}"
    return f"{len(found)} launches, expected {len(expected)}"


LAYER_SCENARIOS = {"layers_by_programs": layers_by_programs}
