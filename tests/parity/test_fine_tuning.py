"""Real weights on real tasks, patched transformers beside untouched: loss curves and quality after 100 steps.

Two layers of MiniLM, their embeddings frozen, learn to find spam (SMS messages, transformers' Trainer) and entities
(WNUT-17, a loop on accelerate).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.testing.tolerances import ABSOLUTE, RELATIVE

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

STEPS, BATCH_SIZE, MAX_LENGTH, HELD_OUT = 100, 4, 32, 400
KINDS = ("person", "location", "corporation", "product", "creative-work", "group")
TAGS = ["O", *(f"{part}-{kind}" for kind in KINDS for part in "BI")]

Example = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task's model, data and way of training; label 0 is the one that does not count for F1."""

    model: str
    num_labels: int
    learning_rate: float
    examples: Callable[[Path, bert_fast.BertTokenizer], tuple[list[Example], list[Example]]]  # training, held out
    collator: str
    train: Callable[..., list[float]]  # (model, examples, collate, learning rate, folder) -> loss of every step


def _messages(data: Path, tokenizer: bert_fast.BertTokenizer) -> tuple[list[Example], list[Example]]:
    lines = (data / "classification" / "sms_spam" / "SMSSpamCollection.tsv").read_text().splitlines()
    examples = []
    for line in lines[: STEPS * BATCH_SIZE + HELD_OUT]:
        label, text = line.split("\t", 1)
        examples.append({**tokenizer(text, truncation=True, max_length=MAX_LENGTH), "labels": int(label == "spam")})
    return examples[:-HELD_OUT], examples[-HELD_OUT:]


def _sentences(data: Path, tokenizer: bert_fast.BertTokenizer) -> tuple[list[Example], list[Example]]:
    def read(name: str, count: int, only_with_entities: bool) -> list[Example]:
        examples: list[Example] = []
        for sentence in (data / "sequence_labelling" / "wnut17_en" / name).read_text().split("\n\n"):
            pairs = [line.split("\t") for line in sentence.splitlines() if line.strip()]
            tags = [TAGS.index(tag) for _, tag in pairs]
            if len(examples) == count or not pairs or (only_with_entities and not any(tags)):
                continue
            words = [word for word, _ in pairs]
            encoding = tokenizer(words, is_split_into_words=True, truncation=True, max_length=MAX_LENGTH)
            of_word = encoding.word_ids()  # None for [CLS] and [SEP]; only a word's first piece is labelled
            is_first = [word is not None and word != before for before, word in zip([None, *of_word], of_word)]  # noqa: B905
            labels = [tags[word] if first else -100 for word, first in zip(of_word, is_first, strict=True)]
            examples.append({**encoding, "labels": labels})
        return examples

    return read("train.conll", STEPS * BATCH_SIZE, True), read("dev.conll", HELD_OUT, False)


def _with_trainer(
    model: nn.Module, examples: list[Example], collate: Callable[..., Any], learning_rate: float, folder: Path
) -> list[float]:
    losses: list[float] = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            losses.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH_SIZE, learning_rate=learning_rate,
        warmup_steps=10, use_cpu=True, seed=1, report_to=[], disable_tqdm=True, logging_strategy="no",
        save_strategy="no",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=examples, data_collator=collate).train()
    return losses


def _with_accelerate(
    model: nn.Module, examples: list[Example], collate: Callable[..., Any], learning_rate: float, folder: Path
) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(examples, batch_size=BATCH_SIZE, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=learning_rate, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 10, STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model.train(), optimizer, loader, schedule)
    losses = []
    torch.manual_seed(1)  # of dropout
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TASKS = {
    "spam": Task("BertForSequenceClassification", 2, 5e-4, _messages, "DataCollatorWithPadding", _with_trainer),
    "entities": Task(
        "BertForTokenClassification",
        len(TAGS),
        1e-3,
        _sentences,
        "DataCollatorForTokenClassification",
        _with_accelerate,
    ),
}


def _f1(model: nn.Module, examples: list[Example], collate: Callable[..., Any]) -> float:
    """Of labels other than 0, over all that is labelled."""
    right = claimed = there = 0
    with torch.no_grad():
        for start in range(0, len(examples), 50):
            batch = collate(examples[start : start + 50])
            labels = batch.pop("labels")
            found = model.eval()(**batch).logits.argmax(-1)
            right += int(((found == labels) & (labels > 0)).sum())
            claimed += int(((found > 0) & (labels >= 0)).sum())
            there += int((labels > 0).sum())
    return 2 * right / (claimed + there)


def _hidden_states_of_padding(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Exactly 0 where padding was removed; untouched transformers computes them."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        return model.base_model.eval()(**inputs).last_hidden_state[inputs["attention_mask"] == 0]


@dataclass(frozen=True)
class Outcome:
    losses: Tensor  # of every step
    f1: float


@cache
def _prepared(task: Task, weights: Path, data: Path) -> tuple[Callable[..., Any], list[Example], list[Example]]:
    """(collator, training examples, held-out examples)."""
    tokenizer = bert_fast.BertTokenizer.from_pretrained(weights)
    return getattr(transformers, task.collator)(tokenizer), *task.examples(data, tokenizer)


def _fine_tune(task: Task, patched: bool, dropout_p: float, weights: Path, data: Path, folder: Path) -> Outcome:
    collate, training, held_out = _prepared(task, weights, data)
    torch.manual_seed(0)  # of the classifier
    with bert_fast.patch_transformers() if patched else contextlib.nullcontext():
        model = getattr(transformers, task.model).from_pretrained(
            weights, num_hidden_layers=2, num_labels=task.num_labels, hidden_dropout_prob=dropout_p,
            attention_probs_dropout_prob=dropout_p,
        )  # fmt: skip
    padding = _hidden_states_of_padding(model, collate(training[:BATCH_SIZE]))
    assert padding.numel() > 0 and bool(padding.any()) is not patched  # the fast path is what is compared
    model.base_model.embeddings.requires_grad_(False)
    losses = task.train(model, training, collate, task.learning_rate, folder)
    return Outcome(torch.tensor(losses), _f1(model, held_out, collate))


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", TASKS)
def test_patched_learns_as_untouched(
    name: str, dropout_p: float, minilm_dir: Path, shared_data: Path, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    transformers.utils.logging.set_verbosity_error()  # layers that are left out, a classifier that is new
    untouched, patched = (
        _fine_tune(TASKS[name], patched, dropout_p, minilm_dir, shared_data, tmp_path) for patched in (False, True)
    )
    distance = ((patched.losses - untouched.losses).abs().max() / untouched.losses.max()).item()
    print(f"{name}, dropout {dropout_p}: held-out F1 untouched {untouched.f1:.3f}, patched {patched.f1:.3f}")
    print(f"losses at most {distance:.1e} of the largest apart")
    record_property("f1", (untouched.f1, patched.f1))
    assert len(patched.losses) == len(untouched.losses) == STEPS
    assert untouched.losses[-20:].mean() < 0.5 * untouched.losses[:20].mean(), "nothing was learnt: an empty comparison"
    assert dropout_p > 0.0 or distance <= RELATIVE["fine_tuning_loss_100_steps"]
    assert abs(patched.f1 - untouched.f1) <= ABSOLUTE["fine_tuning_f1"]
