"""A vocabulary of XLM-R's kind, trained on the texts by Hugging Face `tokenizers`, as no package brings a real one.

Its form is that of XLM-R: SentencePiece's character map, WhitespaceSplit and Metaspace, <s> A </s>. There is one of
16,000 pieces, of a quarter of the texts that are measured, and one of as many as XLM-R has, 250,002, of all texts that
there are: words are fewer pieces than elsewhere.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.record import ROOT
from bert_fast.testing.charsmap import encoded, nfkc_map

FOLDER = ROOT / "build" / "benchmarks"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def tokenizer_json(read: Callable[[], Sequence[str]], num_pieces: int, folder: Path = FOLDER) -> str:
    """The tokenizer.json; trained on the lines that `read` gives, in one or two minutes, where it is not there yet."""
    path = folder / f"unigram_{num_pieces}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_train(read(), num_pieces), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _train(lines: Sequence[str], num_pieces: int) -> str:
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
        vocab_size=num_pieces, unk_token="<unk>", special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return str(tokenizer.to_str())
