"""The comparison of encoders as they are served: on a toy, without the peers that may not be installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serving

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
CASE = serving.Case("toy", [[[2, 7, 8, 3], [2, 9, 3]], [[2, 5, 5, 5, 5, 3]]])


@pytest.fixture(scope="module")
def runs() -> dict[str, serving.Run]:
    """Of the contestants that need nothing but PyTorch and transformers."""
    sizes = dict(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = transformers.BertConfig(**sizes, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_is_there", lambda package: False)
        found = serving.contestants(config, model, 1, compiles=False)
    assert list(found) == ["bert_fast", "bert_fast packed", "transformers"]
    return {name: prepare(CASE) for name, prepare in found.items()}


def test_all_are_given_the_same_and_timed(runs: dict[str, serving.Run]) -> None:
    line = serving.measure(runs, CASE, rounds=2)
    assert line["texts"] == 3 and line["fill"] == round(13 / 14, 3)
    assert list(line["entrants"]) == list(runs)
    assert all(entry["ms"] > 0 and entry["bert_fast_ratio"] > 0 for entry in line["entrants"].values())


def test_what_is_wrong_is_not_timed(runs: dict[str, serving.Run]) -> None:
    def wrong() -> list[torch.Tensor]:
        return [states + 0.01 for states in runs["transformers"]()]

    with pytest.raises(RuntimeError, match=r"onnxruntime: expected hidden states within 0\.001 of transformers', got"):
        serving.measure({**runs, "onnxruntime": wrong}, CASE, rounds=1)


def test_the_table_shows_the_newest_line_of_each_case(tmp_path: Path) -> None:
    def line(ms: float, **peers: float) -> dict[str, Any]:
        entrants = {"bert_fast": {"ms": 9.0, "bert_fast_ratio": 1.1}, "bert_fast packed": {"ms": ms}}
        entrants |= {name: {"ms": 1.0, "bert_fast_ratio": ratio} for name, ratio in peers.items()}
        return {"kind": "serving", "case": "serving/MiniLM/one_31", "threads": 2, "entrants": entrants}

    path = tmp_path / "serving.jsonl"
    lines = [line(8.0, transformers=2.0), line(7.0, transformers=1.5, openvino=0.9)]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    assert serving.table(path).splitlines()[2:] == ["| MiniLM, one_31 | 2 | 7.00 | 1.50 | 0.90 |"]
