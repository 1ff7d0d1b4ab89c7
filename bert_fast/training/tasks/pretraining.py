"""The task pretrain: masked words, and whether one text follows another."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bert_fast.data.pretraining import PretrainingSource, token_counts, unigram_entropy
from bert_fast.data.pretraining_checks import context_free_loss
from bert_fast.data.token_store import TokenStore
from bert_fast.data.tokenize_files import tokenize_files
from bert_fast.errors import SourceError
from bert_fast.models import BertForMaskedLM, BertForPreTraining
from bert_fast.tokenization import Tokenizer


@dataclass
class PretrainingArguments:
    """Text to learn words, and which sentence follows which, from."""

    train_file: list[str] = field(metadata={"help": "Text files, or one token store."})
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to judge by."})
    text_format: str = field(
        default="auto",
        metadata={"help": "Of text files: text, lines, jsonl, parquet, or auto: by their endings."},
    )
    text_column_name: str = field(default="text", metadata={"help": "Key or column of the text in JSON and Parquet."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens of an example, special tokens counted."})
    next_sentence: bool = field(
        default=True,
        metadata={"help": "Pairs of sentences, and whether the second follows; else masked words only."},
    )
    whole_words: bool = field(default=False, metadata={"help": "Mask all pieces of a word or none."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to predict."})
    short_sequence_probability: float = field(
        default=0.1, metadata={"help": "Share of pairs that are made shorter than max_seq_length."}
    )


class Pretraining:
    """Learns masked words and next sentences (`BertForPreTraining`), or masked words alone (`BertForMaskedLM`).

    Metrics beside the loss: masked_accuracy, the share of masked words guessed; next_sentence_accuracy (with pairs);
    unigram_entropy, the loss of masked words that guessing by frequency gives; context_free_loss, that of guessing
    without a look at other words, on the examples that are judged by (see `pretraining_checks`): what is below it was
    learned from context.
    """

    Arguments = PretrainingArguments
    metric_for_best_model = "loss"
    greater_is_better = False

    def __init__(self, arguments: PretrainingArguments, tokenizer: Tokenizer) -> None:
        self.arguments, self.tokenizer = arguments, tokenizer
        self.model_class: Any = BertForPreTraining if arguments.next_sentence else BertForMaskedLM
        self._levels: tuple[Any, Any, dict[str, float]] | None = None  # of the examples last judged by

    def read(self, files: Sequence[str], seed: int, place: Path | None = None) -> PretrainingSource:
        """Examples of text files, or of one token store.

        Args:
            files: their paths.
            seed: of pairs and masks.
            place: of the store that text files become, kept for the next start; None: it is forgotten.

        Raises:
            OSError, SourceError, StoreError, ValueError: files or arguments are missing or wrong.
        """
        arguments = self.arguments
        store = self._store(list(files), place)
        if not len(store.tokens):
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)  # or it would be in the way of other files
            raise SourceError(f"{', '.join(files)}: expected text, got none that makes tokens")
        return PretrainingSource(
            store,
            self.tokenizer,
            max_length=arguments.max_seq_length,
            next_sentence=arguments.next_sentence,
            whole_words=arguments.whole_words,
            mask_probability=arguments.mlm_probability,
            seed=seed,
            short_sequence_probability=arguments.short_sequence_probability,
        )

    def _store(self, files: list[str], place: Path | None) -> TokenStore:
        if any(os.path.isdir(file) for file in files):
            if len(files) > 1:
                raise ValueError(f"train_file: expected text files, or one token store, got {', '.join(files)}")
            return TokenStore.open(files[0], self.tokenizer)
        options: Any = {"format": self.arguments.text_format, "field": self.arguments.text_column_name}
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            return tokenize_files(files, place, self.tokenizer, **options)
        with tempfile.TemporaryDirectory() as folder:  # the store stays mapped into memory
            return tokenize_files(files, Path(folder) / "store", self.tokenizer, **options)

    @staticmethod
    def answers(said: Any, labels: Any) -> tuple[Tensor, ...]:
        """What metrics need of the scores of a batch, for `preprocess_logits_for_metrics`.

        Returns: whether each masked word was guessed (bool [M]); with pairs, their scores (fp32 [B, 2]).
        """
        (words, *pairs), labels = (said, labels[0]) if isinstance(said, tuple) else ((said,), labels)
        return words.argmax(dim=-1) == labels, *pairs

    def metrics(self, train: PretrainingSource, valid: PretrainingSource, predictions: Any, label_ids: Any) -> Any:
        """See the class.

        Args:
            train: what is learned from, whose frequencies count.
            valid: what is judged by.
            predictions: `answers` of all batches.
            label_ids: words to predict (int64 [M]); with pairs also whether they are random (int64 [n]).
        """
        if self._levels is None or self._levels[0] is not train or self._levels[1] is not valid:
            levels = {
                "unigram_entropy": unigram_entropy(train.store, self.tokenizer),
                "context_free_loss": context_free_loss(valid, token_counts(train.store, self.tokenizer)),
            }
            self._levels = train, valid, levels  # each takes a pass over the whole store
        found = dict(self._levels[2])
        is_right, *pairs = predictions if isinstance(predictions, tuple) else (predictions,)
        found["masked_accuracy"] = float(is_right.mean())
        if pairs:
            found["next_sentence_accuracy"] = float(np.mean(pairs[0].argmax(axis=1) == label_ids[-1]))
        return found
