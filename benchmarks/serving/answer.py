"""One contestant from its files to the first answer, in a process that imports nothing but what it needs.

    python -m benchmarks.serving.answer CONTESTANT FOLDER THREADS     prints a line of JSON; `start.py` calls it

The answer are hidden states of one text of 31 tokens.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

IDS = [101, *range(2000, 2029), 102]
SHOWN = 8  # of the answer's numbers, by which contestants are compared
# None once all is imported, then some of the first answer's numbers; the model is kept until the memory was looked at.
Contestant = Callable[[Path, int], Iterator[Any]]
States = Callable[[dict[str, Any]], Any]  # hidden states of a batch, from and to NumPy's arrays


def _plain(folder: Path) -> Any:
    from transformers import BertModel

    return BertModel.from_pretrained(folder, add_pooling_layer=False).eval()


def _fused(folder: Path) -> Any:
    import bert_fast

    return bert_fast.fuse(_plain(folder))


def _own(folder: Path) -> Any:
    import bert_fast

    return bert_fast.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()


def onnxruntime_states(onnx_model: str | bytes, threads: int) -> States:
    """A model of ONNX, a file's name or its bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def openvino_states(model: Any, threads: int) -> States:
    """A model of OpenVINO, a file's name or the model itself."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    return lambda inputs: compiled(inputs)[0].copy()


def hidden_states(model: Any) -> list[float]:
    """The first numbers of a PyTorch model's answer."""
    import torch

    ids = torch.tensor([IDS])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    shown: list[float] = states[0, 0, :SHOWN].tolist()
    return shown


def _of_torch(packages: str, load: Callable[[Path], Any]) -> Contestant:
    def steps(folder: Path, threads: int) -> Iterator[Any]:
        import torch

        for package in packages.split():
            importlib.import_module(package)
        yield None
        torch.set_num_threads(threads)
        model = load(folder)
        yield hidden_states(model)

    return steps


def _of_file(package: str, name: str, load: Callable[[str, int], States]) -> Contestant:
    def steps(folder: Path, threads: int) -> Iterator[Any]:
        import numpy as np

        importlib.import_module(package)
        yield None
        states, ids = load(str(folder / name), threads), np.array([IDS])
        yield states({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0, 0, :SHOWN].tolist()

    return steps


_BERT = "transformers.models.bert.modeling_bert"
CONTESTANTS: dict[str, Contestant] = {
    "bert_fast.fuse": _of_torch(f"{_BERT} bert_fast", _fused),
    "bert_fast.BertModel": _of_torch("bert_fast", _own),
    "transformers": _of_torch(_BERT, _plain),
    "onnxruntime": _of_file("onnxruntime", "model.onnx", onnxruntime_states),
    "onnxruntime optimized": _of_file("onnxruntime", "optimized.onnx", onnxruntime_states),
    "openvino": _of_file("openvino", "openvino.xml", openvino_states),
}


def _mib(field: str) -> float:
    """A size of this process, as Linux says it in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def _main(name: str, folder: str, threads: str) -> None:
    begun = time.perf_counter()
    steps = CONTESTANTS[name](Path(folder), int(threads))
    next(steps)
    imported = time.perf_counter()
    answer = next(steps)
    times = {"import_s": imported - begun, "answer_s": time.perf_counter() - imported}
    print(json.dumps({**times, "resident_mib": _mib("VmRSS"), "most_mib": _mib("VmHWM"), "answer": answer}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
