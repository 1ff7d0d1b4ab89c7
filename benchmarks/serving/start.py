"""From files to the first answer: seconds and memory, each contestant in a process of its own (`answer.py`).

The files were written just before and are in the system's cache: transformers' safetensors, the ONNX model as exported
and with ONNX Runtime's fusions, and OpenVINO's own format, fp32 all of them. Making them is not counted.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kit.bert import Size
from benchmarks.kit.study import in_a_process
from benchmarks.serving.answer import CONTESTANTS, hidden_states
from benchmarks.serving.contestants import check_close, exported, for_openvino, is_there, model_of, optimized

FIGURES = {"import_s": 2, "answer_s": 2, "resident_mib": 0, "most_mib": 0}  # and their digits


def measure_start(size: Size, threads: int, rounds: int) -> dict[str, Any]:
    """Medians of every contestant's figures. Raises RuntimeError where a process fails or answers do not agree."""
    model = model_of(size)
    with tempfile.TemporaryDirectory() as folder:
        names = _write(Path(folder), model)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, lines in found.items():
                lines.append(in_a_process("serving.answer", name, folder, str(threads)))
        weights = (Path(folder) / "model.safetensors").stat().st_size
    expected = hidden_states(model)
    for name, lines in found.items():
        check_close(name, max(abs(a - b) for a, b in zip(lines[0]["answer"], expected, strict=True)))
    return {
        "entrants": {
            name: {key: round(statistics.median(line[key] for line in lines), d) for key, d in FIGURES.items()}
            for name, lines in found.items()
        },
        "weights_mib": round(weights / 2**20),
        "rounds": rounds,
    }


def _write(folder: Path, model: Any) -> list[str]:
    """The files of every contestant whose packages are there; returns their names."""
    model.save_pretrained(folder)
    names = [name for name in CONTESTANTS if "bert_fast" in name or name == "transformers"]
    if all(map(is_there, ("onnx", "onnxruntime"))):
        onnx = exported(model)
        (folder / "model.onnx").write_bytes(onnx)
        (folder / "optimized.onnx").write_bytes(optimized(onnx, model.config))
        names += ["onnxruntime", "onnxruntime optimized"]
        if is_there("openvino"):
            import openvino

            openvino.save_model(for_openvino(onnx), folder / "openvino.xml", compress_to_fp16=False)
            names.append("openvino")
    return names
