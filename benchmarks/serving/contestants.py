"""What encodes: bert_fast, and what people serve with; those whose packages are not there are named and left out."""

import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.bert import Size
from benchmarks.serving.cases import Case

Run = Callable[[], list[Tensor]]  # hidden states of every batch


def model_of(size: Size) -> Any:
    """transformers' model, with random weights."""
    import transformers

    torch.manual_seed(0)
    config = size.config(transformers.BertConfig, attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def contestants(model: Any, threads: int, compiles: bool) -> dict[str, Callable[[Case], Run]]:
    """What each makes of a case; those whose packages are not there are named on stderr."""
    import bert_fast

    fused = bert_fast.fuse(_copy(model))
    found = {"bert_fast": _of_torch(fused), "bert_fast packed": _of_packed(fused), "transformers": _of_torch(model)}
    if compiles:
        # The number of threads is part of the code that is made, and so of the key under which it is kept.
        compiled = torch.compile(_copy(model), dynamic=True, options={"cpp.threads": threads})
        found["torch.compile"] = _of_torch(compiled)
    if all(map(is_there, ("onnx", "onnxruntime"))):
        onnx = exported(model)
        found["onnxruntime"] = _of_onnxruntime(onnx, threads)
        found["onnxruntime optimized"] = _of_onnxruntime(optimized(onnx, model.config), threads)
        if is_there("openvino"):
            found["openvino"] = _of_openvino(onnx, threads)
    return found


def is_there(package: str) -> bool:
    """Whether a package is installed; if not, stderr says so."""
    found = importlib.util.find_spec(package) is not None
    if not found:
        print(f"{package} is not installed: left out", file=sys.stderr)
    return found


def _copy(model: Any) -> Any:
    copy = type(model)(model.config, add_pooling_layer=False).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def _of_torch(model: Any) -> Callable[[Case], Run]:
    def prepare(case: Case) -> Run:
        batches = case.padded()

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(input_ids=ids, attention_mask=mask).last_hidden_state for ids, mask in batches]

        return run

    return prepare


def _of_packed(model: Any) -> Callable[[Case], Run]:
    def prepare(case: Case) -> Run:
        batches = case.packed()

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


def _of_onnxruntime(onnx_model: bytes, threads: int) -> Callable[[Case], Run]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])

    def prepare(case: Case) -> Run:
        inputs = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in case.padded()]
        return lambda: [torch.from_numpy(session.run(None, one)[0]) for one in inputs]

    return prepare


def _of_openvino(onnx_model: bytes, threads: int) -> Callable[[Case], Run]:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(openvino.convert_model(io.BytesIO(onnx_model)), "CPU", settings)

    def prepare(case: Case) -> Run:
        inputs = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in case.padded()]
        return lambda: [torch.from_numpy(compiled(one)[0].copy()) for one in inputs]

    return prepare
