"""The task pretrain: masked words, and whether one text follows another."""

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.batches import Batches, Source
from bert_fast.data.pretraining import PretrainingSource, token_counts, unigram_entropy
from bert_fast.data.pretraining_checks import context_free_loss, repeated_share, unknown_share
from bert_fast.errors import SourceError
from bert_fast.models import BertForMaskedLM, BertForPreTraining, BertPreTrainedModel
from bert_fast.models.losses import class_loss
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import OnMain, TaskSettings, check_sources, source_of_kind

__all__ = ["PretrainSettings", "PretrainingTask"]

_NUM_GUESSES = 5
_NUM_WRITTEN = 1000  # examples
_UNKNOWN = 0.01  # share of [UNK] from which on a tokenizer is taken to be of another language
_REPEATED = 0.1  # share of the tokens in sentences that stood there before, from which on it is said
_NEAR = 0.1  # of the context-free loss: so near to it nothing of context is learned yet
_ROWS_AT_ONCE = 512  # of scores over the vocabulary, in fp32


@dataclass(frozen=True)
class PretrainSettings(TaskSettings):
    """Text to learn words, and which sentence follows which, from."""

    summary: ClassVar[str] = "a model that learns to fill in words from plain text"
    # Devlin et al. 2018 (arXiv:1810.04805), appendix A.2.
    training_defaults: ClassVar[Mapping[str, Any]] = {
        "learning_rate": 1e-4, "warmup": 0.01, "batch_size": None, "batch_tokens": 16384
    }  # fmt: skip
    is_pretraining: ClassVar[bool] = True

    train: tuple[str, ...]  # text files, or one token store
    valid: tuple[str, ...] | None = None  # the same, to judge by
    format: Literal["auto", "text", "lines", "jsonl", "parquet"] = "auto"  # of text files; auto: by their endings
    field: str = "text"  # key or column of the text in JSON lines and Parquet
    max_length: int = 128  # tokens of an example, special tokens counted
    next_sentence: bool = True  # pairs of sentences, and whether the second follows; else masked words only
    whole_words: bool = False  # mask all pieces of a word or none
    mask_probability: float = 0.15  # share of tokens to predict
    short_sequence_probability: float = 0.1  # share of pairs made shorter than max_length
    long_length: int | None = None  # a second phase with examples of this length
    long_share: float = 0.1  # of the steps, that the second phase takes

    def __post_init__(self) -> None:
        if self.long_length is not None and self.long_length <= self.max_length:
            raise ValueError(f"long_length: expected more than max_length={self.max_length}, got {self.long_length}")
        if not 0 < self.long_share < 1:
            raise ValueError(f"long_share: expected a share between 0 and 1, got {self.long_share}")

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForPreTraining if self.next_sentence else BertForMaskedLM

    def make_task(self, train: Any, valid: Any) -> "PretrainingTask":
        """See `TaskSettings.make_task`."""
        return PretrainingTask(train, valid)

    def sources(
        self, tokenizer: Tokenizer, *, seed: int, tokens_dir: Path | None, on_main: OnMain
    ) -> tuple[PretrainingSource, PretrainingSource | None]:
        """See `TaskSettings.sources`."""
        train = self._source(self.train, tokenizer, seed, _below(tokens_dir, "train"), on_main)
        if self.valid is None:
            return train, None
        return train, self._source(self.valid, tokenizer, seed, _below(tokens_dir, "valid"), on_main)

    def labelled_source(
        self, files: Sequence[str], tokenizer: Tokenizer, *, seed: int, labels: Sequence[str] | None
    ) -> PretrainingSource:
        """See `TaskSettings.labelled_source`: text files, or one token store."""
        return self._source(files, tokenizer, seed)

    def _source(
        self,
        files: Sequence[str],
        tokenizer: Tokenizer,
        seed: int,
        place: Path | None = None,
        on_main: OnMain = lambda action: action(),
    ) -> PretrainingSource:
        """Examples of text files or of one token store.

        place: of the store that text files become; None: it is forgotten with the source.
        """

        def tokenize(directory: Path) -> TokenStore:
            return tokenize_files(files, directory, tokenizer, format=self.format, field=self.field)

        stores = [file for file in files if os.path.isdir(file)]
        if stores and len(files) > 1:
            raise SettingsError(f"train, valid: expected text files, or one token store, got {', '.join(files)}")
        if stores:
            store = TokenStore.open(files[0], tokenizer)
        elif place is not None:
            on_main(lambda: str(tokenize(place).path))
            store = TokenStore.open(place, tokenizer)
            if not len(store.tokens):
                on_main(lambda: shutil.rmtree(place))  # or it would be in the way of the right files
        else:
            with tempfile.TemporaryDirectory() as temporary:  # the store stays mapped into memory
                store = tokenize(Path(temporary) / "store")
        if not len(store.tokens):
            raise SourceError(f"{', '.join(files)}: expected text, got none that makes tokens")
        return PretrainingSource(
            store,
            tokenizer,
            max_length=self.max_length,
            next_sentence=self.next_sentence,
            whole_words=self.whole_words,
            mask_probability=self.mask_probability,
            seed=seed,
            short_sequence_probability=self.short_sequence_probability,
        )

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> Any:
        """Raises SettingsError: nobody asks such a model about examples."""
        raise SettingsError("task: a pre-trained model says nothing of examples; fine-tune it")

    @property
    def longest(self) -> int:
        """See `TaskSettings.longest`."""
        return self.long_length or self.max_length

    def phases(self, training: TrainingConfig) -> list[tuple[TaskSettings, TrainingConfig]]:
        """See `TaskSettings.phases`: two where `long_length` asks for it, each in a directory of its own.

        As in Devlin et al. 2018 (arXiv:1810.04805), appendix A.2: most steps with short sequences, since attention to
        long ones costs more, then the rest with long ones, to learn the remaining positions. Each has a warm-up and a
        schedule of its own.
        """
        if self.long_length is None:
            return [(self, training)]
        first, second = (training.output_dir / f"length-{length}" for length in (self.max_length, self.long_length))
        if training.steps is not None:
            long_steps = round(training.steps * self.long_share)
            if not 0 < long_steps < training.steps:
                raise SettingsError(
                    f"long_share: {self.long_share} of {training.steps} steps leaves a phase without any"
                )
            amounts: list[dict[str, Any]] = [{"steps": training.steps - long_steps}, {"steps": long_steps}]
        else:
            assert training.epochs is not None
            amounts = [{"epochs": training.epochs * share} for share in (1 - self.long_share, self.long_share)]
        short = dataclasses.replace(self, long_length=None)
        long = dataclasses.replace(short, max_length=self.long_length)
        return [
            (short, dataclasses.replace(training, output_dir=first, **amounts[0])),
            (long, dataclasses.replace(training, output_dir=second, **amounts[1])),
        ]


def _below(directory: Path | None, name: str) -> Path | None:
    if directory is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


class PretrainingTask(Task):
    """Masked words and next sentences by a `BertForPreTraining`, or masked words alone by a `BertForMaskedLM`.

    Parts of the loss: masked_lm, the mean over all masked words of a step, and with pairs next_sentence, the mean over
    all pairs. Metrics: perplexity (e to the masked_lm loss); masked_accuracy (share of masked words guessed); with
    pairs next_sentence_accuracy; unigram_entropy, the masked_lm loss of guessing by frequency alone (of the tokens of
    `train`); context_free_loss, that of guessing without a look at other words, on the examples that are judged by (see
    `pretraining_checks`): what is below it was learned from context. The best checkpoint is that of the least loss.

    Args:
        train: see `Task`.
        valid: likewise; with pairs where train has them.

    Raises:
        ValueError: one of the two has pairs, the other has not.
    """

    train: PretrainingSource | None
    valid: PretrainingSource | None
    name = "pretrain"
    falling = ("loss", "masked_lm", "next_sentence", "perplexity")

    def __init__(self, train: PretrainingSource | None = None, valid: PretrainingSource | None = None) -> None:
        check_sources(PretrainingSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        if train is not None and valid is not None and train.next_sentence != valid.next_sentence:
            raise ValueError(f"valid: expected next_sentence={train.next_sentence}, as in train, got the other")
        self._unigram_entropy: float | None = None
        self._context_free: tuple[PretrainingSource, float] | None = None  # of the examples last judged by

    def notes(self, batches: Batches) -> list[str]:
        """See `Task.notes`: words that the tokenizer does not know, and text that repeats itself."""
        notes = []
        for name, source in (("train", self.train), ("valid", self.valid)):
            unknown = 0.0 if source is None else unknown_share(source.store, source.tokenizer)
            if unknown > _UNKNOWN:
                notes.append(
                    f"tokenizer: {unknown:.1%} of the tokens of {name} are [UNK], words that it has no pieces for: is "
                    "it of this language? They are never predicted, and hide what is around words"
                )
        repeated = repeated_share(source_of_kind(PretrainingSource, batches.source).store)
        if repeated > _REPEATED:
            notes.append(
                f"train: {repeated:.0%} of the tokens stand in sentences that stood there before: they are learned by "
                "heart, and the loss of training will be lower than the model is good. Leave repeats out"
            )
        return notes

    def meaning_of_stall(self, metrics: Mapping[str, float]) -> str | None:
        """See `Task.meaning_of_stall`: the plateau before context is learned."""
        loss, level, entropy = (metrics[name] for name in ("masked_lm", "context_free_loss", "unigram_entropy"))
        if loss < level - _NEAR:
            return None
        if loss > (level + entropy) / 2 > level:  # on text that is harder than that of training the entropy is lower
            return (
                f"masked_lm is {loss:.4g}, little below {entropy:.4g}, which guessing by frequency gives: after the "
                "warm-up a learning rate that is too high, five or ten times, keeps a model there"
            )
        return (
            f"masked_lm is {loss:.4g}, and {level:.4g} is what guessing without a look at other words gives. Every "
            "BERT comes to this plateau first, and over it by more steps: go on, or try smaller batches and more of "
            "them, a smaller vocabulary, and for a model narrower than 768 an initializer_range above 0.02, as "
            "0.02 * sqrt(768 / hidden_size)"
        )

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`."""
        counts = {"masked_lm": len(batch["labels"])}
        if "next_sentence_label" in batch:
            counts["next_sentence"] = batch.num_sequences
        return counts

    def loss_parts(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `Task.loss_parts`. No scores of words are kept: the models take their loss from them chunk by chunk."""
        return _parts(model(**batch), batch)

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`.

        guesses (int32 [T, 5]): the likeliest tokens, the best one first, where a word is masked; -1 elsewhere.
        is_right (bool [T]): whether the first is the word that was there.
        surprise (fp32 [T]): minus the logarithm of that word's probability; 0 where none is masked.
        follows (fp32 [B], with pairs): the probability that B follows A. is_pair_right (bool [B]): whether it is on the
        right side of one half.
        """
        output = model(**batch, output_logits=True)
        scores = output["prediction_logits"] if "prediction_logits" in output else output["logits"]
        said = _guesses(scores, batch["masked_lm_positions"], batch["labels"], len(batch["input_ids"]))
        if "seq_relationship_logits" in output:
            said["follows"] = output["seq_relationship_logits"].float().softmax(dim=1)[:, 0]
            said["is_pair_right"] = (said["follows"] < 0.5) == (batch["next_sentence_label"] == 1)
        return _parts(output, batch), said

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`."""
        source = source_of_kind(PretrainingSource, source)
        guesses, is_right, surprise = (predictions.tokens(name)[0] for name in ("guesses", "is_right", "surprise"))
        num_masked = max(1, int((guesses[:, 0] >= 0).sum()))
        loss = float(surprise.sum(dtype=np.float64)) / num_masked
        metrics = {
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "masked_accuracy": int(is_right.sum()) / num_masked,
            "unigram_entropy": self._entropy(source),
            "context_free_loss": self._level(source),
        }
        if source.next_sentence:
            metrics["next_sentence_accuracy"] = float(predictions.rows("is_pair_right").mean())
        return metrics

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes what the model makes of the first 1,000 examples, one a line: path.jsonl.

        A line has index; text, as tokens with [MASK]; masked: for every word to predict its place, the word,
        what stands there now, and five guesses; with pairs follows, the probability that B follows A, and label.
        """
        file = path.with_name(f"{path.name}.jsonl")
        with open(file, "w", encoding="utf-8") as opened:
            for row in self.rows(source_of_kind(PretrainingSource, source), predictions):
                opened.write(json.dumps(row, ensure_ascii=False) + "\n")
        return [file]

    def rows(self, source: PretrainingSource, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The lines of `write_predictions`."""
        guesses, boundaries = predictions.tokens("guesses")
        follows = predictions.rows("follows") if source.next_sentence else None
        name_of = source.tokenizer.convert_ids_to_tokens
        for index in range(min(_NUM_WRITTEN, len(predictions))):
            batch = source.batch(0, np.array([index]))
            shown = name_of(batch["input_ids"].tolist())
            masked = [
                {
                    "place": place,
                    "word": word,
                    "shown": shown[place],
                    "guesses": name_of([token for token in guesses[boundaries[index] + place].tolist() if token >= 0]),
                }
                for place, word in zip(
                    batch["masked_lm_positions"].tolist(), name_of(batch["labels"].tolist()), strict=True
                )
            ]
            row: dict[str, Any] = {"index": index, "text": " ".join(shown), "masked": masked}
            if follows is not None:
                row["label"] = "random" if int(batch["next_sentence_label"]) else "follows"
                row["follows"] = round(float(follows[index]), 4)
            yield row

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(PretrainingSource, source).decode(0, index)

    def _entropy(self, source: PretrainingSource) -> float:
        if self._unigram_entropy is None:
            known = self.train or source
            self._unigram_entropy = unigram_entropy(known.store, known.tokenizer)
        return self._unigram_entropy

    def _level(self, source: PretrainingSource) -> float:
        """The context-free loss of these examples."""
        if self._context_free is None or self._context_free[0] is not source:
            known = self.train or source
            counts = token_counts(known.store, known.tokenizer)
            self._context_free = (source, context_free_loss(source, counts))
        return self._context_free[1]


def _parts(output: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The loss of a model as its parts; that of BertForPreTraining is their sum."""
    if "next_sentence_label" not in batch:
        return {"masked_lm": output["loss"]}
    next_sentence = class_loss(output["seq_relationship_logits"], batch["next_sentence_label"], "next_sentence_label")
    return {"masked_lm": output["loss"] - next_sentence, "next_sentence": next_sentence}


def _guesses(scores: Tensor, positions: Tensor, labels: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """What scores [M, V] say of the words at `positions`, laid out over all tokens; see `PretrainingTask.predict`."""
    guesses = torch.full((num_tokens, _NUM_GUESSES), -1, dtype=torch.int32, device=labels.device)
    is_right = torch.zeros(num_tokens, dtype=torch.bool, device=labels.device)
    surprise = torch.zeros(num_tokens, dtype=torch.float32, device=labels.device)
    pieces = (tensor.split(_ROWS_AT_ONCE) for tensor in (scores, positions, labels))
    for some, places, words in zip(*pieces, strict=True):
        some = some.float()
        best = some.topk(min(_NUM_GUESSES, some.shape[1]), dim=1).indices
        guesses[places, : best.shape[1]] = best.int()
        is_right[places] = best[:, 0] == words
        surprise[places] = F.cross_entropy(some, words, reduction="none")
    return {"guesses": guesses, "is_right": is_right, "surprise": surprise}
