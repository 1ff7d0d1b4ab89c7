"""The Python that README and the migration page show runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bert_fast
from bert_fast import ops

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "another"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small masked-LM model and its vocabulary."""
    config = bert_fast.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=16,
    )  # fmt: skip
    folder = tmp_path / "checkpoint"
    bert_fast.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


def _code(page: str) -> str:
    """All Python of a page, behind one another."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, f"{page} shows no Python"
    return "\n".join(blocks)


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
@pytest.mark.parametrize("page", ["README.md", "docs/migration.md"])
def test_snippets_run(page: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    input_ids = torch.randint(5, len(WORDS), (2, 6))
    coords = torch.cartesian_prod(torch.arange(2), torch.arange(6)).int()
    given: dict[str, Any] = dict(
        path=checkpoint, input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=input_ids,
        x=torch.randn(12, 16), residual=torch.randn(12, 16), weight=torch.ones(16), bias=torch.zeros(16),
        coords=coords, seed=torch.tensor([1]), ops=ops,
    )  # fmt: skip
    exec(_code(page).replace("path/to/checkpoint", str(checkpoint)), given)
