"""Looks whether hidden states of texts are the same bits alone and in random batches, without gradients on the CPU.

    python -m tools.same_bits                        10,000 real lengths, a model of MiniLM's form; some minutes
    python -m tools.same_bits --texts 200 --layers 1

Every text is encoded alone, padded among others, and packed among others, in batches of 1 to 64 in random order, by one
thread and by two. Prints how many texts differ in a bit; exit status 1 if any does.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import bert_fast

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
VOCAB_SIZE = 1000  # ids are drawn; only lengths are real


def lengths(count: int) -> list[int]:
    """Tokens of messages and questions, the same every time. Raises OSError where the texts are not there."""
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    texts = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]]
    texts += [paragraph["context"] for paragraph in paragraphs]
    lines = (DATA / "classification" / "sms_spam" / "SMSSpamCollection.tsv").read_text(encoding="utf-8").splitlines()
    texts += [line.split("\t", 1)[1] for line in lines]
    tokenizer = bert_fast.BertTokenizer.from_pretrained(DATA / "vocab" / "bert-base-uncased")
    found = [min(len(ids), 512) for ids in tokenizer(texts)["input_ids"]]
    return [found[index % len(found)] for index in range(count)]


def differing(model: bert_fast.BertModel, texts: list[Tensor], threads: int, generator: torch.Generator) -> int:
    """How many texts have other bits in one of two batches than alone."""
    torch.set_num_threads(1)
    alone = [model(input_ids=text[None]).last_hidden_state[0] for text in texts]
    torch.set_num_threads(threads)
    differ: set[int] = set()
    for is_packed in (False, True):
        order = torch.randperm(len(texts), generator=generator).tolist()
        while order:
            size = int(torch.randint(1, 65, (1,), generator=generator))
            chosen, order = order[:size], order[size:]
            rows = [texts[index] for index in chosen]
            sizes = [len(row) for row in rows]
            if is_packed:
                cu_seqlens = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
                states = model(input_ids=torch.cat(rows), cu_seqlens=cu_seqlens, max_seqlen=max(sizes))
                made = list(states.last_hidden_state.split(sizes))
            else:
                ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
                mask = torch.arange(ids.shape[1]) < torch.tensor(sizes)[:, None]
                states = model(input_ids=ids, attention_mask=mask)
                made = [y[:n] for y, n in zip(states.last_hidden_state, sizes, strict=True)]
            differ |= {one for one, y in zip(chosen, made, strict=True) if not torch.equal(y, alone[one])}
    return len(differ)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.same_bits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = bert_fast.BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=384, num_hidden_layers=options.layers, num_attention_heads=12,
        intermediate_size=1536,
    )  # fmt: skip
    model = bert_fast.BertModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator) for n in lengths(options.texts)]
    total = 0
    with torch.inference_mode():
        for threads in (1, 2):
            found = differing(model, texts, threads, generator)
            print(
                f"{len(texts):,} texts, {sum(map(len, texts)):,} tokens, threads: {threads}: {found} differ", flush=True
            )
            total += found
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
