"""What is encoded: one text at a time, batches as they come, and batches of sorted texts."""

import csv
from typing import Any, NamedTuple

import torch

from benchmarks.kit.bert import BASE, MINILM, Size
from benchmarks.kit.results import DATA

BATCH_SIZE = 32
TEXTS = 256  # that are cut into batches, before or after they are sorted
SINGLE = (31, 128, 512)
# Name: (size, how many of the batches are timed, evenly spaced).
MODELS: dict[str, tuple[Size, int]] = {"MiniLM": (MINILM, 4), "BERT-base": (BASE, 2)}
CASES = (*(f"one_{length}" for length in SINGLE), "as_they_come", "sorted")
Batch = dict[str, Any]  # arguments of a model


class Case(NamedTuple):
    """What is encoded in a round: batches of token ids."""

    name: str
    batches: list[list[list[int]]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every text."""
        return [len(ids) for batch in self.batches for ids in batch]

    @property
    def fill(self) -> float:
        """Share of the padded batches that is tokens."""
        return sum(self.lengths) / sum(len(batch) * max(map(len, batch)) for batch in self.batches)

    def gflop(self, size: Size) -> float:
        """Of the products of the layers and of attention, 1e9 operations, without those for padding."""
        attention = 4 * size.layers * size.hidden * sum(length**2 for length in self.lengths)
        return (sum(self.lengths) * size.encoder_flops_per_token + attention) / 1e9

    def padded(self) -> list[Batch]:
        """input_ids and attention_mask of every batch, [B, S]."""
        made = []
        for batch in self.batches:
            rows = [torch.tensor(ids) for ids in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            made.append({"input_ids": ids, "attention_mask": mask})
        return made

    def packed(self) -> list[Batch]:
        """The same without padding, for a fused model."""
        made = []
        for batch in self.batches:
            lengths = torch.tensor([0, *map(len, batch)])
            ids = torch.tensor([token for ids in batch for token in ids])
            cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
            made.append(dict(input_ids=ids, cu_seqlens=cu_seqlens, max_seqlen=int(lengths.max())))
        return made


def cases(num_batches: int) -> dict[str, Case]:
    """`CASES` by name; of batches, `num_batches`, evenly spaced. Raises OSError where the texts are not there."""
    texts = reviews()
    start, *stream = [token for ids in texts for token in ids[:-1]]
    end = texts[0][-1]
    found = [[[[start, *stream[: length - 2], end]]] for length in SINGLE]
    for ordered in (texts, sorted(texts, key=len)):
        batches = [ordered[begin : begin + BATCH_SIZE] for begin in range(0, len(ordered), BATCH_SIZE)]
        stride = len(batches) // num_batches
        found.append(batches[stride // 2 :: stride])
    return {name: Case(name, batches) for name, batches in zip(CASES, found, strict=True)}


def reviews() -> list[list[int]]:
    """Ids of the first film reviews of a set, in its order."""
    from bert_fast import BertTokenizer

    with (DATA / "classification" / "sentence_polarity" / "train.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        texts = [row["sentence"] for row, _ in zip(rows, range(TEXTS), strict=False)]
    tokenizer = BertTokenizer.from_pretrained(DATA / "vocab" / "bert-base-uncased")
    return [list(ids) for ids in tokenizer(texts)["input_ids"]]
