"""What encodes: bert_fast, and what people serve with; those whose packages are not there are named and left out."""

import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.bert import Size
from benchmarks.serving.answer import onnxruntime_session, openvino_model
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
    found = {
        "bert_fast": _of_torch(fused, _padded),
        "bert_fast packed": _of_torch(fused, Case.packed),
        "transformers": _of_torch(model, _padded),
    }
    if compiles:
        # The number of threads is part of the code that is made, and so of the key under which it is kept.
        compiled = torch.compile(_copy(model), dynamic=True, options={"cpp.threads": threads})
        found["torch.compile"] = _of_torch(compiled, _padded)
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


def _of_torch(model: Any, arguments: Callable[[Case], list[dict[str, Any]]]) -> Callable[[Case], Run]:
    """arguments: of the model, for every batch of a case."""

    def prepare(case: Case) -> Run:
        batches = arguments(case)

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(**batch).last_hidden_state for batch in batches]

        return run

    return prepare


def _padded(case: Case) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in case.padded()]


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
    session = onnxruntime_session(onnx_model, threads)
    return _of_arrays(lambda inputs: session.run(None, inputs)[0])


def _of_openvino(onnx_model: bytes, threads: int) -> Callable[[Case], Run]:
    import openvino

    compiled = openvino_model(openvino.convert_model(io.BytesIO(onnx_model)), threads)
    return _of_arrays(lambda inputs: compiled(inputs)[0].copy())


def _of_arrays(states: Callable[[dict[str, Any]], Any]) -> Callable[[Case], Run]:
    """states: hidden states of a batch, from and to NumPy's arrays."""

    def prepare(case: Case) -> Run:
        inputs = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in _padded(case)]
        return lambda: [torch.from_numpy(states(one)) for one in inputs]

    return prepare
