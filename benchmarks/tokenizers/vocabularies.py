"""Vocabularies of the tokenizers: published ones of BERT, and ones of XLM-R's kind, trained on the texts.

No package brings a real Unigram vocabulary. The trained ones have the form of XLM-R's: SentencePiece's character map,
WhitespaceSplit and Metaspace, <s> A </s>.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.results import DATA, ROOT

FOLDER = ROOT / "build" / "benchmarks"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Vocabulary:
    """A published BERT vocabulary."""

    name: str
    lowercase: bool

    @property
    def path(self) -> Path:
        """Its vocab.txt."""
        return DATA / "vocab" / self.name / "vocab.txt"

    def tokens(self) -> list[str]:
        """All of them, by id."""
        return self.path.read_text(encoding="utf-8").splitlines()

    def tokenizer_json(self) -> Path:
        """The tokenizer.json that transformers would save for it, made by `tokenizers` where it is not there yet."""
        path = FOLDER / f"{self.name.replace(' ', '_').replace(',', '')}.json"
        if not path.is_file():
            from bert_fast.files import write_atomically

            made = self._make().encode()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda temporary: temporary.write_bytes(made))
        return path

    def _make(self) -> str:
        import tokenizers
        from tokenizers.processors import TemplateProcessing

        tokens = self.tokens()
        made = tokenizers.BertWordPieceTokenizer(str(self.path), lowercase=self.lowercase)
        made._tokenizer.add_special_tokens(list(SPECIAL))
        made._tokenizer.post_processor = TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, tokens.index(token)) for token in ("[CLS]", "[SEP]")],
        )
        return str(made.to_str())


@dataclass(frozen=True)
class UnigramVocabulary(Vocabulary):
    """Trained in one or two minutes on the lines that `read` gives."""

    num_pieces: int
    read: Callable[[], Sequence[str]]

    @property
    def path(self) -> Path:
        """ValueError: there are scores beside the tokens, which no vocab.txt holds."""
        raise ValueError("no vocab.txt of a Unigram model")

    def _make(self) -> str:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        from bert_fast.testing.charsmap import encoded, nfkc_map

        state: dict[str, Any] = json.loads(Tokenizer(models.Unigram()).to_str())
        state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": encoded(nfkc_map())}
        tokenizer = Tokenizer.from_str(json.dumps(state))
        assert isinstance(tokenizer.normalizer, normalizers.Precompiled)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        trainer = trainers.UnigramTrainer(
            vocab_size=self.num_pieces, unk_token="<unk>", special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
            show_progress=False,
        )  # fmt: skip
        tokenizer.train_from_iterator(self.read(), trainer)
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        return str(tokenizer.to_str())
