"""One contestant from its files to the first answer, in a process that imports nothing but what it needs.

    python -m benchmarks.serving.answer CONTESTANT FOLDER THREADS     prints a line of JSON; `start.py` calls it

The answer are hidden states of one text of 31 tokens.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

IDS = [101, *range(2000, 2029), 102]
SHOWN = 8  # of the answer's numbers, by which contestants are compared
# None once all is imported, then some of the first answer's numbers; the model is kept until the memory was looked at.
Steps = Iterator[Any]


def _of_transformers(folder: Path, threads: int) -> Steps:
    import torch
    from transformers import BertModel

    yield None
    torch.set_num_threads(threads)
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    yield hidden_states(model)


def _of_fuse(folder: Path, threads: int) -> Steps:
    import torch
    from transformers import BertModel

    import bert_fast

    yield None
    torch.set_num_threads(threads)
    model = bert_fast.fuse(BertModel.from_pretrained(folder, add_pooling_layer=False).eval())
    yield hidden_states(model)


def _of_own_class(folder: Path, threads: int) -> Steps:
    import torch

    import bert_fast

    yield None
    torch.set_num_threads(threads)
    model = bert_fast.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    yield hidden_states(model)


def hidden_states(model: Any) -> list[float]:
    """The first numbers of a PyTorch model's answer."""
    import torch

    ids = torch.tensor([IDS])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    shown: list[float] = states[0, 0, :SHOWN].tolist()
    return shown


def onnxruntime_session(onnx_model: str | bytes, threads: int) -> Any:
    """What runs a model of ONNX, a file's name or its bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])


def openvino_model(model: Any, threads: int) -> Any:
    """What runs a model of OpenVINO, a file's name or the model itself."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(model, "CPU", settings)


def _of_onnxruntime(folder: Path, threads: int, name: str = "model.onnx") -> Steps:
    import numpy as np
    import onnxruntime  # noqa: F401  (counted as an import)

    yield None
    session = onnxruntime_session(str(folder / name), threads)
    ids = np.array([IDS])
    yield session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0, 0, :SHOWN].tolist()


def _of_onnxruntime_optimized(folder: Path, threads: int) -> Steps:
    return _of_onnxruntime(folder, threads, "optimized.onnx")


def _of_openvino(folder: Path, threads: int) -> Steps:
    import numpy as np
    import openvino  # noqa: F401  (counted as an import)

    yield None
    compiled = openvino_model(str(folder / "openvino.xml"), threads)
    ids = np.array([IDS])
    yield compiled({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0, 0, :SHOWN].tolist()


CONTESTANTS: dict[str, Callable[[Path, int], Steps]] = {
    "bert_fast.fuse": _of_fuse,
    "bert_fast.BertModel": _of_own_class,
    "transformers": _of_transformers,
    "onnxruntime": _of_onnxruntime,
    "onnxruntime optimized": _of_onnxruntime_optimized,
    "openvino": _of_openvino,
}


def _mib(field: str) -> float:
    """A size of this process, as Linux says it in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def main(name: str, folder: str, threads: str) -> int:
    """Command line."""
    begun = time.perf_counter()
    steps = CONTESTANTS[name](Path(folder), int(threads))
    next(steps)
    imported = time.perf_counter()
    answer = next(steps)
    answered = time.perf_counter()
    times = {"import_s": imported - begun, "answer_s": answered - imported}
    print(json.dumps({**times, "resident_mib": _mib("VmRSS"), "most_mib": _mib("VmHWM"), "answer": answer}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
