"""Whole training runs: our `Trainer` from loader to optimizer, on a CPU beside transformers' `Trainer`.

On a CPU, the model MiniLM in fp32, batches of 32, AdamW, dropout 0.1, no evaluation, no checkpoints in the time:

    run/minilm/sms          classification of the SMS collection: one epoch, in slices that the contestants take in turn
    run/minilm/mlm/LENGTHS  masked words (15 %) in sequences of stored lengths, random tokens

transformers pads each batch to its longest sequence and attends by SDPA, its defaults. The goal is 0.9 / fill, fill
being the share of real tokens in what it computes.

On a GPU, the cases that `make gpu` times: masked words, bf16 by autocast, LAMB, full and real lengths; tokens/s, MFU,
peak memory, and the share of time for which the loop waited for a batch.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit import bert
from benchmarks.kit.bert import VOCAB_SIZE
from benchmarks.kit.clock import Times
from benchmarks.kit.record import DATA
from benchmarks.models.build import draw_lengths
from benchmarks.recipes.data import minilm
from benchmarks.registry import Case
from bert_fast import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizer
from bert_fast.data.masking import Masking
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Step, Task, Trainer, TrainingConfig
from bert_fast.training.reporting import model_flops

MLM_LENGTHS = ("single_books", "squad_windows_384_stride128", "packed_nsp_512")
BATCH_SIZE = 32
SLICES = 4  # of the SMS collection
MLM_STEPS = 3  # of each contestant in a round


class DrawnSource:
    """Sequences of given lengths out of random tokens, 15 % of them hidden as in pre-training."""

    def __init__(self, lengths: list[int], vocab_size: int = VOCAB_SIZE) -> None:
        self._lengths = np.array(lengths, dtype=np.int32)
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = BertTokenizer([*special, *(f"w{number}" for number in range(vocab_size - len(special)))])
        self._masking = Masking(tokenizer)
        self._vocab_size = vocab_size

    def lengths(self, epoch: int) -> np.ndarray:
        return self._lengths

    def tokens(self, index: int) -> np.ndarray:
        """The words of a sequence, [CLS] and [SEP] around them."""
        draw = np.random.default_rng(index)
        words = draw.integers(5, self._vocab_size, self._lengths[index])
        words[0], words[-1] = 2, 3
        return words

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        lengths = self._lengths[indices]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        masked = self._masking(np.concatenate([self.tokens(i) for i in indices]), cu_seqlens, indices, 0, epoch)
        return PackedBatch(
            input_ids=torch.from_numpy(masked.input_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
            max_seqlen=int(lengths.max()),
            labels=torch.from_numpy(masked.labels),
            masked_lm_positions=torch.from_numpy(masked.positions),
        )


class MaskedWords(Task):
    """Masked words, nothing to judge by."""

    name = "pretrain"

    def __init__(self, train: DrawnSource) -> None:
        self.train, self.valid = train, None

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        return {"loss": len(batch["labels"])}

    def predict(self, model: Any, batch: Any) -> Any:
        return {"loss": model(**batch).loss}, {}

    def score(self, source: Any, predictions: Any) -> dict[str, float]:
        return {}

    def write_predictions(self, path: Path, source: Any, predictions: Any) -> list[Path]:
        return []


class _Steps:
    """An observer that keeps the steps it is told of."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _train(model: Any, task: Task, **settings: Any) -> list[Step]:
    """Trains from the start in a directory that is thrown away; the steps as they were told."""
    observer = _Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(output_dir=Path(folder) / "run", **settings)
        Trainer(model, task, config, observers=[observer]).train()
    return observer.steps


# On a CPU, beside transformers


def _sms(rounds: int) -> dict[str, Any]:
    """One epoch over the SMS collection, by slices; `rounds` is how many slices."""
    import transformers

    from bert_fast.data.classification import ClassificationSource
    from bert_fast.training.tasks import ClassificationTask

    tokenizer = BertTokenizer.from_pretrained(minilm())
    path = DATA / "classification" / "sms_spam" / "SMSSpamCollection.tsv"
    source = ClassificationSource.read(path, tokenizer, text="1", label="0", max_length=128)
    order = np.random.default_rng(0).permutation(len(source))
    models = [
        kind.from_pretrained(minilm(), num_labels=2)
        for kind in (BertForSequenceClassification, transformers.BertForSequenceClassification)
    ]
    parts = (np.sort(part) for part in np.array_split(order, SLICES)[:rounds])
    examples = ((ClassificationTask(source.take(part)), [source[i] for i in part]) for part in parts)
    collator = transformers.DataCollatorWithPadding(_plain_tokenizer())
    return _in_turn("run/minilm/sms", models, examples, collator)


def masked_words(lengths: str, rounds: int, size: bert.Size = bert.MINILM) -> dict[str, Any]:
    """Steps on sequences of stored lengths."""
    import transformers

    case = Case("minilm", lengths, 384 if "384" in lengths else 512, "random", "training", MLM_STEPS * BATCH_SIZE)
    sources = map(DrawnSource, draw_lengths(case, rounds))
    models = [
        BertForMaskedLM(size.config(BertConfig)),
        transformers.BertForMaskedLM(size.config(transformers.BertConfig)),
    ]
    examples = (
        (MaskedWords(source), [{"input_ids": source.tokens(i).tolist()} for i in range(case.batch_size)])
        for source in sources
    )
    collator = transformers.DataCollatorForLanguageModeling(_plain_tokenizer(), mlm_probability=0.15)
    return _in_turn(f"run/{size.name}/mlm/{lengths}", models, examples, collator)


_SAME = {"learning_rate": 5e-5, "weight_decay": 0.01, "log_every": 10_000}


def _in_turn(name: str, models: Any, examples: Iterable[tuple[Task, list[Any]]], collator: Any) -> dict[str, Any]:
    """Trains (ours, transformers') in turn, each on the same examples; tokens a second, and the ratio aimed at."""
    seconds: list[tuple[float, float]] = []
    real = padded = 0
    for task, features in examples:
        steps = _train(models[0], task, epochs=1, batch_size=BATCH_SIZE, keep_checkpoints=0, **_SAME)
        taken, computed = _theirs(models[1], features, collator)
        seconds.append((sum(step.seconds for step in steps), taken))
        real += sum(step.tokens for step in steps)
        padded += computed
    ours, theirs = map(Times, zip(*seconds, strict=True))
    fill = real / padded
    return {
        "case": name,
        "fill": round(fill, 4),
        "real_tokens": real,
        "bert_fast_tokens_per_s": round(real / sum(ours.seconds), 1),
        "transformers_tokens_per_s": round(real / sum(theirs.seconds), 1),
        "ratio": round(ours.speedup_over(theirs), 3),
        "goal": round(0.9 / fill, 3),
        "bert_fast_s": [round(s, 3) for s in ours.seconds],
        "transformers_s": [round(s, 3) for s in theirs.seconds],
    }


def _theirs(model: Any, features: list[dict[str, Any]], collator: Any) -> tuple[float, int]:
    """(seconds, padded tokens) of an epoch of transformers' Trainer."""
    import transformers

    padded = 0

    def collate(examples: list[dict[str, Any]]) -> Any:
        nonlocal padded
        batch = collator(examples)
        padded += batch["input_ids"].numel()
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=1, per_device_train_batch_size=BATCH_SIZE, learning_rate=5e-5,
            weight_decay=0.01, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=features, data_collator=collate)
        return trainer.train().metrics["train_runtime"], padded


def _plain_tokenizer() -> Any:
    """transformers' tokenizer over the words of a `DrawnSource`; collators need its special tokens only."""
    import tokenizers
    import transformers

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4} | {f"w{i}": i for i in range(5, VOCAB_SIZE)}
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    return transformers.BertTokenizerFast(tokenizer_object=core)


# name -> function of the number of rounds
CPU_RUNS = {"run/minilm/sms": _sms} | {
    f"run/minilm/mlm/{lengths}": (lambda rounds, lengths=lengths: masked_words(lengths, rounds))
    for lengths in MLM_LENGTHS
}


# On a GPU


@dataclass(frozen=True)
class RunCase:
    """One run. lengths: "full", or "even": any length from 1 to max_len. batch_tokens: of a step."""

    shape: str
    lengths: str
    max_len: int
    batch_tokens: int
    steps: int = 30
    vocab_size: int = VOCAB_SIZE

    @property
    def name(self) -> str:
        """Stable name used in results."""
        return f"run/{self.shape}/{self.lengths}@{self.max_len}/{self.batch_tokens} tokens"

    def source(self) -> DrawnSource:
        """Examples for all steps."""
        count = 2 * self.steps * self.batch_tokens // self.max_len
        draw = np.random.default_rng(0)
        lengths = np.full(count, self.max_len) if self.lengths == "full" else draw.integers(2, self.max_len + 1, count)
        return DrawnSource(lengths.tolist(), self.vocab_size)


# The most telling first: should time run out, the others are missing.
CASES = (
    RunCase("large", "even", 512, 16384),
    RunCase("base", "full", 128, 32768),
    RunCase("base", "full", 512, 32768),
    RunCase("large", "full", 128, 16384),
)
SMALL_CASES = (RunCase("tiny", "even", 16, 64, steps=4, vocab_size=100),)


def time_run(case: RunCase, matmul_tflop_s: float | None = None) -> Iterator[dict[str, Any]]:
    """One run of our Trainer in bf16; the first third of its steps warms up and is not counted.

    matmul_tflop_s: what the device reaches in a large matrix product, for MFU; None: not measured.
    """
    model = BertForMaskedLM(bert.BY_NAME[case.shape].config(BertConfig, vocab_size=case.vocab_size))
    steps = _train(
        model, MaskedWords(case.source()), steps=case.steps, batch_size=None, batch_tokens=case.batch_tokens,
        optimizer="lamb", learning_rate=1e-3, precision="bf16", log_every=max(1, case.steps // 3), keep_checkpoints=0,
    )  # fmt: skip
    counted = steps[1:]
    seconds, tokens = sum(step.seconds for step in counted), sum(step.tokens for step in counted)
    per_token, per_square = model_flops(model.config, type(model).__name__)
    flops = tokens * per_token + sum(step.squares for step in counted) * per_square
    tflop_s = round(flops / seconds / 1e12, 3)
    yield {
        "case": case.name,
        "provider": "bert_fast",
        "tokens_per_s": round(tokens / seconds, 1),
        "sequences_per_s": round(sum(step.sequences for step in counted) / seconds, 1),
        "tflop_s": tflop_s,
        "mfu": round(tflop_s / matmul_tflop_s, 4) if matmul_tflop_s else None,
        "matmul_ceiling_tflop_s": matmul_tflop_s,
        "wait_share": round(sum(step.wait_seconds for step in counted) / seconds, 4),
        "fill": round(tokens / sum(step.capacity_tokens for step in counted), 4),
        "peak_bytes": max(step.memory_bytes for step in counted),
        "steps": sum(step.num_steps for step in counted),
        "last_loss": round(counted[-1].losses["loss"], 4),
    }
