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
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.kit import bert
from benchmarks.kit.bert import VOCAB_SIZE
from benchmarks.kit.clock import Times
from benchmarks.kit.results import DATA
from benchmarks.models.build import draw_lengths
from benchmarks.recipes.data import minilm
from benchmarks.registry import Case
from bert_fast import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizer
from bert_fast.data.batches import Source
from bert_fast.data.examples import Examples
from bert_fast.data.masking import Masking
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Trainer, TrainingArguments

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

    def __len__(self) -> int:
        return len(self._lengths)

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


def _trainer(kind: type[Trainer], model: Any, source: Source, folder: str, **settings: Any) -> Trainer:
    """A Trainer that leaves nothing behind and says nothing."""
    import transformers

    arguments = TrainingArguments(folder, save_strategy="no", report_to="none", disable_tqdm=True, **settings)
    trainer = kind(model, arguments, train_dataset=source)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# On a CPU, beside transformers


def _sms(rounds: int) -> dict[str, Any]:
    """One epoch over the SMS collection, by slices; `rounds` is how many slices."""
    import transformers

    from bert_fast.training.tasks.classification import Classification, ClassificationArguments

    arguments = ClassificationArguments(text_column_name="1", label_column_name="0")
    task = Classification(arguments, BertTokenizer.from_pretrained(minilm()))
    source = task.read(str(DATA / "classification" / "sms_spam" / "SMSSpamCollection.tsv"))
    order = np.random.default_rng(0).permutation(len(source))
    models = [
        kind.from_pretrained(minilm(), num_labels=2)
        for kind in (BertForSequenceClassification, transformers.BertForSequenceClassification)
    ]
    parts = (source.take(np.sort(part)) for part in np.array_split(order, SLICES)[:rounds])
    examples = ((part, _features(part)) for part in parts)
    collator = transformers.DataCollatorWithPadding(_plain_tokenizer())
    return _in_turn("run/minilm/sms", models, examples, collator)


def _features(examples: Examples) -> list[dict[str, Any]]:
    """Single examples, as transformers' Trainer takes them."""
    texts = np.split(examples.sequences.ids, examples.sequences.boundaries[1:-1])
    labels = examples.labels["labels"].tolist()
    return [{"input_ids": ids.tolist(), "labels": label} for ids, label in zip(texts, labels, strict=True)]


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
        (source, [{"input_ids": source.tokens(i).tolist()} for i in range(case.batch_size)]) for source in sources
    )
    collator = transformers.DataCollatorForLanguageModeling(_plain_tokenizer(), mlm_probability=0.15)
    return _in_turn(f"run/{size.name}/mlm/{lengths}", models, examples, collator)


_SAME: dict[str, Any] = {
    "num_train_epochs": 1, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": 5e-5, "weight_decay": 0.01,
    "logging_strategy": "no", "use_cpu": True,
}  # fmt: skip


def _in_turn(name: str, models: Any, examples: Iterable[tuple[Source, list[Any]]], collator: Any) -> dict[str, Any]:
    """Trains (ours, transformers') in turn, each on the same examples; tokens a second, and the ratio aimed at."""
    seconds: list[tuple[float, float]] = []
    real = padded = 0
    for source, features in examples:
        with tempfile.TemporaryDirectory() as folder:
            trained = _trainer(Trainer, models[0], source, folder, **_SAME).train()
        taken, computed = _theirs(models[1], features, collator)
        seconds.append((trained.metrics["train_runtime"], taken))
        real += int(source.lengths(0).sum())
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
            output_dir=folder, save_strategy="no", report_to="none", disable_tqdm=True, **_SAME
        )
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


class _Watched(Trainer):
    """Counts what the steps after the first `warm_up` are of: lengths of sequences, labels, seconds waited for batches.

    began: when the first of them began, with the device idle.
    """

    warm_up = 0
    began = waited = 0.0
    num_labels = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lengths: list[int] = []

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """See `Trainer.get_batch_samples`."""
        if self.state.global_step == self.warm_up:
            _wait_for_device()
            self.began = time.perf_counter()
        before = time.perf_counter()
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step >= self.warm_up:
            self.waited += time.perf_counter() - before
            for batch in batches:
                self.lengths += batch["cu_seqlens"].diff().tolist()
                self.num_labels += len(batch["labels"])
        return batches, count


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_run(case: RunCase, matmul_tflop_s: float | None = None) -> Iterator[dict[str, Any]]:
    """One run of our Trainer in bf16; the first third of its steps warms up and is not counted.

    matmul_tflop_s: what the device reaches in a large matrix product, for MFU; None: not measured.
    """
    is_on_gpu = torch.cuda.is_available()
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
    size, warm_up = bert.BY_NAME[case.shape], max(1, case.steps // 3)
    model = BertForMaskedLM(size.config(BertConfig, vocab_size=case.vocab_size))
    with tempfile.TemporaryDirectory() as folder:
        run: Any = _trainer(
            _Watched, model, case.source(), folder, max_steps=case.steps,
            per_device_train_batch_tokens=case.batch_tokens, lamb=True, learning_rate=1e-3, weight_decay=0.01,
            bf16=True, logging_steps=warm_up, dataloader_num_workers=1 if is_on_gpu else 0,
        )  # fmt: skip
        run.warm_up = warm_up
        run.train()
        _wait_for_device()
        seconds = time.perf_counter() - run.began
    steps, tokens = case.steps - warm_up, sum(run.lengths)
    flops = size.training_flops(run.lengths, run.num_labels, case.vocab_size)
    tflop_s = round(flops / seconds / 1e12, 3)
    yield {
        "case": case.name,
        "provider": "bert_fast",
        "tokens_per_s": round(tokens / seconds, 1),
        "sequences_per_s": round(len(run.lengths) / seconds, 1),
        "tflop_s": tflop_s,
        "mfu": round(tflop_s / matmul_tflop_s, 4) if matmul_tflop_s else None,
        "matmul_ceiling_tflop_s": matmul_tflop_s,
        "wait_share": round(run.waited / seconds, 4),
        "fill": round(tokens / (steps * case.batch_tokens), 4),
        "peak_bytes": torch.cuda.max_memory_allocated() if is_on_gpu else None,
        "steps": steps,
        "last_loss": round([entry["loss"] for entry in run.state.log_history if "loss" in entry][-1], 4),
    }
