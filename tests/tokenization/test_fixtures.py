"""Golden outputs of transformers 4.57.6 and 5.23.0 (tokenizers 0.22.2 and 0.23.3) on real texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.tokenization import BertTokenizer

from .conftest import read_lines

FILES = {
    "bert-base-uncased": 734,
    "bert-base-cased": 728,
    "bert-base-chinese": 384,
    "bert-base-chinese.lower": 143,
    "bert-base-multilingual-cased": 730,
}


@pytest.mark.parametrize("name", FILES)
def test_every_line_of_the_golden_files(name: str, shared_data: Path, ours: Callable[..., BertTokenizer]) -> None:
    lines = list(read_lines(shared_data / "fixtures" / "tokenizer" / f"{name}.jsonl"))
    assert len(lines) == FILES[name]
    kinds = set()
    for line in lines:
        tokenizer = ours(line["vocab"], do_lower_case=line["do_lower_case"])
        encoding = tokenizer(
            line["text"],
            line["pair"],
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            **line["options"],
        )
        expected = line["expected"]
        if line["kind"] == "qa_windows":
            assert encoding["overflow_to_sample_mapping"] == [0] * len(expected), line["id"]
            for row, window in enumerate(expected):
                actual = {key: encoding[key][row] for key in ENTRIES}
                assert comparable(actual) == comparable(window), (line["id"], row)
        else:
            assert comparable(encoding) == comparable(expected), (line["id"], line["text"])
            if "word_ids" in expected:
                assert encoding.word_ids() == expected["word_ids"], line["id"]
        kinds.add(line["kind"])
    assert {"single", "words", "qa_windows", "mask_token", "pair", "no_special", "truncate_pad"} <= kinds


ENTRIES = ("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "offset_mapping")


def comparable(row: Any) -> dict[str, Any]:
    """One row with the same names and types, whether it is ours or the file's."""
    offsets = row["offsets"] if "offsets" in row else row["offset_mapping"]
    return {**{key: list(row[key]) for key in ENTRIES[:-1]}, "offsets": [list(span) for span in offsets]}


def test_where_older_python_tokenizers_differ_we_follow_the_fast_one(
    shared_data: Path, ours: Callable[..., BertTokenizer]
) -> None:
    lines = list(read_lines(shared_data / "fixtures" / "tokenizer" / "slow_fast_disagreements.jsonl"))
    assert len(lines) == 130
    for line in lines:
        tokenizer = ours(line["vocab"], do_lower_case=line["do_lower_case"])
        assert tokenizer(line["text"])["input_ids"] == line["fast4_fast5"], line["text"]
        assert line["slow4"] != line["fast4_fast5"]


def test_inputs_of_the_minilm_fixture(shared_data: Path, minilm_dir: Path, use_engine: str) -> None:
    """Thirteen texts, two of them pairs, padded to 256 and packed."""
    rows = json.loads((shared_data / "fixtures" / "minilm" / "texts.json").read_text(encoding="utf-8"))
    expected = np.load(shared_data / "fixtures" / "minilm" / "embeddings.npz")
    tokenizer = BertTokenizer.from_pretrained(minilm_dir)
    texts = [(row["text"], row["pair"]) if row["pair"] else row["text"] for row in rows]
    padded = tokenizer(texts, padding="max_length", max_length=256, truncation=True, return_tensors="np")
    for key in ("input_ids", "token_type_ids", "attention_mask"):
        assert (padded[key] == expected[key]).all()
    packed = tokenizer.pack(texts, max_length=256)
    assert packed["cu_seqlens"].tolist() == expected["cu_seqlens"].tolist()
    assert packed["input_ids"].tolist() == expected["input_ids"][expected["attention_mask"] == 1].tolist()
