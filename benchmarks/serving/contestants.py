"""What encodes: bert_fast, and what people serve with; those whose packages are not there are named and left out."""

import copy
import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.bert import Size
from benchmarks.serving.answer import States, onnxruntime_states, openvino_states
from benchmarks.serving.cases import Batch, Case

Run = Callable[[], list[Tensor]]  # hidden states of every batch
TOLERANCE = 1e-3  # between fp32 hidden states, which are of size 1


def model_of(size: Size) -> Any:
    """transformers' model, with random weights."""
    import transformers

    torch.manual_seed(0)
    config = size.config(transformers.BertConfig, attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def contestants(model: Any, threads: int, compiles: bool) -> dict[str, Callable[[Case], Run]]:
    """What each makes of a case; those whose packages are not there are named on stderr."""
    import bert_fast

    fused = bert_fast.fuse(copy.deepcopy(model))
    found = {
        "bert_fast": _of_torch(fused, Case.padded),
        "bert_fast packed": _of_torch(fused, Case.packed),
        "transformers": _of_torch(model, Case.padded),
    }
    if compiles:
        # The number of threads is part of the code that is made, and so of the key under which it is kept.
        compiled = torch.compile(copy.deepcopy(model), dynamic=True, options={"cpp.threads": threads})
        found["torch.compile"] = _of_torch(compiled, Case.padded)
    if all(map(is_there, ("onnx", "onnxruntime"))):
        onnx = exported(model)
        found["onnxruntime"] = _of_arrays(onnxruntime_states(onnx, threads))
        found["onnxruntime optimized"] = _of_arrays(onnxruntime_states(optimized(onnx, model.config), threads))
        if is_there("openvino"):
            found["openvino"] = _of_arrays(openvino_states(for_openvino(onnx), threads))
    return found


def check_close(name: str, error: float) -> None:
    """Raises RuntimeError if a contestant's hidden states are further from transformers' than `TOLERANCE`."""
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}: expected hidden states within {TOLERANCE} of transformers', got {error:.1e}")


def is_there(package: str) -> bool:
    """Whether a package is installed; if not, stderr says so."""
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"{package} is not installed: left out", file=sys.stderr)
    return found


def _of_torch(model: Any, arguments: Callable[[Case], list[Batch]]) -> Callable[[Case], Run]:
    """arguments: of the model, for every batch of a case."""

    def prepare(case: Case) -> Run:
        batches = arguments(case)

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(**batch).last_hidden_state for batch in batches]

        return run

    return prepare


def exported(model: Any) -> bytes:
    """As ONNX, of any batch size and length."""
    import logging

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    file, dynamic = io.BytesIO(), {0: "batch", 1: "sequence"}

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            states: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return states

    ids = torch.ones(2, 16, dtype=torch.long)
    torch.onnx.export(
        Plain().eval(), (ids, ids), file, dynamo=False, opset_version=17, input_names=["input_ids", "attention_mask"],
        output_names=["states"], dynamic_axes={"input_ids": dynamic, "attention_mask": dynamic, "states": dynamic},
    )  # fmt: skip
    return file.getvalue()


def optimized(onnx_model: bytes, config: Any) -> bytes:
    """With ONNX Runtime's fused attention, GELU and LayerNorm."""
    import onnx
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    model = optimize_by_fusion(
        onnx.load_from_string(onnx_model), "bert", config.num_attention_heads, config.hidden_size, FusionOptions("bert")
    )
    serialized: bytes = model.model.SerializeToString()
    return serialized


def for_openvino(onnx_model: bytes) -> Any:
    """As OpenVINO has it."""
    import openvino

    return openvino.convert_model(io.BytesIO(onnx_model))


def _of_arrays(states: States) -> Callable[[Case], Run]:
    def prepare(case: Case) -> Run:
        inputs = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in case.padded()]
        return lambda: [torch.from_numpy(states(one)) for one in inputs]

    return prepare
