"""A vocabulary of XLM-R's kind, trained on the texts by Hugging Face `tokenizers`, as no package brings a real one.

Its form is that of XLM-R: SentencePiece's character map, WhitespaceSplit and Metaspace, <s> A </s>. Its 16,000 pieces
are fewer than XLM-R's 250,002, and its texts are those that it was trained on: words are fewer pieces than elsewhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.record import ROOT
from bert_fast.testing.charsmap import encoded, nfkc_map

NUM_PIECES = 16_000
FILE = ROOT / "build" / "benchmarks" / f"unigram_{NUM_PIECES}.json"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def tokenizer_json(lines: Sequence[str], path: Path = FILE) -> str:
    """The tokenizer.json; trained on the lines, which takes a minute, where it is not there yet."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_train(lines), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _train(lines: Sequence[str]) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": encoded(nfkc_map())}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    assert isinstance(tokenizer.normalizer, normalizers.Precompiled)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=NUM_PIECES, unk_token="<unk>", special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return str(tokenizer.to_str())
