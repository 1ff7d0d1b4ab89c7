"""What docs/finetuning.md shows of classification and multiple choice runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM

PAGE = Path(__file__).resolve().parents[2] / "docs" / "finetuning.md"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


def section(title: str) -> str:
    """The Python of a section."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    monkeypatch.setattr("bert_fast.training.trainer.default_observers", lambda *_: [])  # their reports take seconds
    monkeypatch.chdir(tmp_path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained("path/to/model")
    Path("path/to/model/vocab.txt").write_text("\n".join(WORDS) + "\n")
    for name in ("train.tsv", "dev.tsv"):
        Path(name).write_text("sentence\tlabel\n" + "good film\tpos\nbad film\tneg\n" * 10)
    Path("train.csv").write_text("sent1,sent2,ending0,ending1,label\n" + "good film,film,good,bad,0\n" * 10)
    given: dict[str, Any] = {}
    exec(section("Classification"), given)
    assert given["result"].outcome == "finished"
    assert len(list(given["loader"])) == 1
    assert (given["result"].model_dir / "vocab.txt").is_file()
    exec(section("Multiple choice"), given)
    assert "* 0: [CLS] good film [SEP] film good [SEP]" in capsys.readouterr().out
    assert given["trainer"].train().outcome == "finished"
