"""What docs/finetuning.md shows runs: the snippet for all tasks, and commands as far as their flags go."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "good",
    "bad",
    "film",
    "john",
    "lives",
    "in",
    "oslo",
    "a",
    "city",
]


@pytest.mark.filterwarnings("ignore")  # heads that a masked-LM checkpoint lacks
@pytest.mark.parametrize("name", ["classify", "choice", "ner", "qa"])
def test_python(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet with the word of each task, and a file of its kind; the model has a loss."""
    pytest.importorskip("datasets")
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=384,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained("path/to/model")
    Path("path/to/model/vocab.txt").write_text("\n".join(WORDS) + "\n")
    answers = [{"text": "a city", "answer_start": 8}]
    qas = [{"id": str(n), "question": "What is Oslo?", "answers": answers} for n in range(4)]
    content = {"data": [{"paragraphs": [{"context": "Oslo is a city.", "qas": qas}]}]}
    for part in ("train", "dev"):
        Path(f"{part}.tsv").write_text("text\tlabel\n" + "good film\tpos\nbad film\tneg\n" * 2)
        Path(f"{part}.csv").write_text("sent1,sent2,ending0,ending1,label\n" + "good film,film,good,bad,0\n" * 4)
        Path(f"{part}.conll").write_text("John B-PER\nlives O\nin O\nOslo B-LOC\n\n" * 4)
        Path(f"{part}.json").write_text(json.dumps(content))
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    ending = {"classify": "tsv", "choice": "csv", "ner": "conll", "qa": "json"}[name]
    given: dict[str, Any] = {}
    exec(snippet.replace('"ner"', repr(name)).replace(".conll", f".{ending}"), given)
    train = given["train"]
    assert len(train) == 4 and given["task"].model_class is type(given["model"])
    assert torch.isfinite(given["model"](**train.batch(0, torch.arange(4).numpy())).loss)


def test_flags_of_the_commands_are_there() -> None:
    """And those of the tables, each under its task."""
    pytest.importorskip("transformers", minversion="5")
    from transformers import HfArgumentParser

    from bert_fast.cli.arguments import ModelArguments
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks import TASKS, task_named

    commands = [
        shlex.split(line.replace("\\\n", " "))
        for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
        for line in re.split(r"(?<!\\)\n", block.strip())
    ]
    finetune = {words[2]: words for words in commands if words[1] == "finetune"}
    assert finetune.keys() == TASKS.keys()
    for name, words in finetune.items():
        parser = HfArgumentParser([ModelArguments, task_named(name).Arguments, TrainingArguments])
        *_, unknown = parser.parse_args_into_dataclasses(words[3:], return_remaining_strings=True)
        assert not unknown
        title = {"classify": "Classification", "choice": "Multiple choice", "ner": "Named entities"}.get(name)
        section = PAGE.split(f"\n## {title or 'Question answering'}\n")[1].split("\n## ")[0]
        fields = set(task_named(name).Arguments.__dataclass_fields__) - {"train_file", "validation_file"}
        missing = [field for field in fields - {"max_seq_length"} if f"`{field}`" not in section]
        assert not missing, f"{name}: the page does not name {missing}"
