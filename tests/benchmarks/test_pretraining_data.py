"""The benchmark of pre-training data: figures of every case, and what they are compared with."""

import numpy as np
import pytest
import torch

from benchmarks.pretraining_data import CASES, measure
from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files

pytest.importorskip("transformers", reason="its collator is what is compared with")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("store")
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(list("abcdefgh"), 20)) for _ in range(600)]
    (folder / "x.txt").write_text("\n\n".join("\n".join(lines[start : start + 60]) for start in range(0, 600, 60)))
    return tokenize_files([folder / "x.txt"], folder / "store", BertTokenizer(WORDS))


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_figures(store: TokenStore, case: str) -> None:
    torch.set_num_threads(1)
    found = measure(store, BertTokenizer(WORDS), CASES[case], rounds=2)
    entrants = found["entrants"]
    assert 0 < entrants["bert_fast"]["p20"] <= entrants["bert_fast"]["mtokens_per_s"] <= entrants["bert_fast"]["p80"]
    assert found["batches"] > 0 and found["examples"] > 10 and 0 < found["fill"] <= 1
    has_peer = "words" in case and "whole_words" not in case
    assert ("transformers" in entrants) == has_peer
    if has_peer:
        assert entrants["transformers"]["ratio"] > 0


def test_the_cases() -> None:
    assert len(CASES) == 8 and "pretraining_data/pairs/128" in CASES and "pretraining_data/words/512" in CASES
