"""`PretrainingTask`: masked words, and whether one text follows another."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.data.pretraining import PretrainingSource, unigram_entropy
from bert_fast.data.source import Source
from bert_fast.models.losses import class_loss
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.task import Predictions, Task, check_sources

__all__ = ["PretrainingTask"]

_NUM_GUESSES = 5
_NUM_WRITTEN = 1000  # examples
_ROWS_AT_ONCE = 512  # of scores over the vocabulary, in fp32


class PretrainingTask(Task):
    """Masked words and next sentences by a `BertForPreTraining`, or masked words alone by a `BertForMaskedLM`.

    Parts of the loss: masked_lm, the mean over all masked words of a step, and with pairs next_sentence, the mean over
    all pairs. Metrics: perplexity (e to the masked_lm loss); masked_accuracy (share of masked words guessed); with
    pairs next_sentence_accuracy; unigram_entropy, the masked_lm loss of guessing by frequency alone (of the tokens of
    `train`). The best checkpoint is that of the least loss.

    Args:
        train: see `Task`.
        valid: likewise; with pairs where train has them.

    Raises:
        ValueError: one of the two has pairs, the other has not.
    """

    train: PretrainingSource | None
    valid: PretrainingSource | None
    name = "pretrain"

    def __init__(self, train: PretrainingSource | None = None, valid: PretrainingSource | None = None) -> None:
        check_sources(PretrainingSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        if train is not None and valid is not None and train.next_sentence != valid.next_sentence:
            raise ValueError(f"valid: expected next_sentence={train.next_sentence}, as in train, got the other")
        self._unigram_entropy: float | None = None

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
        source = _checked(source)
        guesses, is_right, surprise = (predictions.tokens(name)[0] for name in ("guesses", "is_right", "surprise"))
        num_masked = max(1, int((guesses[:, 0] >= 0).sum()))
        loss = float(surprise.sum(dtype=np.float64)) / num_masked
        metrics = {
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "masked_accuracy": int(is_right.sum()) / num_masked,
            "unigram_entropy": self._entropy(source),
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
            for row in self.rows(_checked(source), predictions):
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
        return _checked(source).decode(0, index)

    def _entropy(self, source: PretrainingSource) -> float:
        if self._unigram_entropy is None:
            known = self.train or source
            self._unigram_entropy = unigram_entropy(known.store, known.tokenizer)
        return self._unigram_entropy


def _checked(source: Source) -> PretrainingSource:
    if not isinstance(source, PretrainingSource):
        raise TypeError(f"source: expected a PretrainingSource, got {type(source).__name__}")
    return source


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
