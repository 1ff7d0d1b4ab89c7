"""Measures texts to vectors on the CPU: sentence-transformers as it is, the same model fused, and the model alone.

    python -m benchmarks.sentence_encoding             a minute of CPU; appends to results/sentence_encoding.jsonl
    python -m benchmarks.sentence_encoding --dry-run   the same, nothing is stored

all-MiniLM-L6-v2, fp32, one thread, batches of 32 as `encode` makes them. Texts are real: questions, paragraphs, both
together, and messages. Contestants take turns; figures are medians over rounds of CPU time, ratios those within a
round. "The model alone" is the fused encoder and the pooling on batches that are packed beforehand: what no way from
texts to vectors with this model can pass.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import DATA, RESULTS, Recorder, cpu_environment
from benchmarks.recipes.data import minilm

ROUNDS = 5
TEXTS = 160  # of a case, spread over the file
BATCH_SIZE = 32
GOAL_OVER_THEIRS = 3.0
GOAL_OF_MODEL = 0.9


def corpora() -> dict[str, list[str]]:
    """The texts of every case. Raises OSError where they are not there."""
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    questions = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]]
    contexts = [paragraph["context"] for paragraph in paragraphs]
    lines = (DATA / "classification" / "sms_spam" / "SMSSpamCollection.tsv").read_text(encoding="utf-8").splitlines()
    return {
        "questions": _spread(questions, TEXTS),
        "paragraphs": _spread(contexts, TEXTS // 4),
        "questions_and_paragraphs": _spread(questions, TEXTS // 2) + _spread(contexts, TEXTS // 8),
        "messages": _spread([line.split("\t", 1)[1] for line in lines], TEXTS),
    }


def _spread(texts: list[str], count: int) -> list[str]:
    return [texts[index * len(texts) // count] for index in range(count)]


def load() -> tuple[Any, Any]:
    """The untouched model and a fused one."""
    from sentence_transformers import SentenceTransformer

    import bert_fast

    return tuple(  # type: ignore[return-value]
        change(SentenceTransformer(str(minilm()), device="cpu")) for change in (lambda model: model, bert_fast.fuse)
    )


def measure(untouched: Any, fused: Any, texts: list[str], rounds: int) -> dict[str, Any]:
    """The figures of a case."""
    batches = packed_batches(fused, texts)
    tokens = sum(len(batch["input_ids"]) for batch in batches)

    def alone() -> None:
        with torch.inference_mode():
            for batch in batches:
                fused(dict(batch))

    contestants: dict[str, Callable[[], object]] = {
        "sentence-transformers": lambda: untouched.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False),
        "bert_fast": lambda: fused.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False),
        "model alone": alone,
    }
    times = interleaved(contestants, rounds, clock=time.process_time)
    entrants = {
        name: {"texts_per_s": round(len(texts) / each.median, 1), "ktokens_per_s": round(tokens / each.median / 1e3, 2)}
        for name, each in times.items()
    }
    ours = times["bert_fast"]
    return {
        "entrants": entrants,
        "over_theirs": round(ours.speedup_over(times["sentence-transformers"]), 3),
        "of_model": round(ours.speedup_over(times["model alone"]), 3),
        "model_over_theirs": round(times["model alone"].speedup_over(times["sentence-transformers"]), 3),
        "texts": len(texts),
        "tokens": tokens,
    }


def packed_batches(fused: Any, texts: list[str]) -> list[dict[str, Any]]:
    """The batches that `encode` makes of texts: longest first, by characters."""
    from bert_fast import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(minilm())
    ordered = sorted(texts, key=len, reverse=True)
    return [
        dict(tokenizer.pack(ordered[start : start + BATCH_SIZE], max_length=fused.max_seq_length))
        for start in range(0, len(ordered), BATCH_SIZE)
    ]


def results(rounds: int) -> Iterator[dict[str, Any]]:
    """The lines to store, case by case. Raises OSError where texts or weights are not there."""
    import bert_fast

    texts, (untouched, fused) = corpora(), load()
    if reasons := bert_fast.why_not(fused):
        raise RuntimeError(f"the fused model does not pack: {reasons}")
    for name, of_case in texts.items():
        yield {"case": f"sentence_encoding/{name}", **measure(untouched, fused, of_case, rounds), "rounds": rounds}


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a figure is below the goal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sentence_encoding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    import sentence_transformers

    environment = cpu_environment() | {"sentence_transformers": sentence_transformers.__version__}
    recorder = Recorder(RESULTS / "sentence_encoding.jsonl", environment)
    is_met = True
    for line in results(options.rounds):
        rates = "  ".join(f"{name} {entry['texts_per_s']:.0f} texts/s" for name, entry in line["entrants"].items())
        ratios = f"{line['over_theirs']:.2f} times theirs, {line['of_model']:.3f} of the model"
        print(f"{line['case']:<46} {rates}  {ratios}", flush=True)
        is_met &= line["over_theirs"] >= GOAL_OVER_THEIRS and line["of_model"] >= GOAL_OF_MODEL
        if not options.dry_run:
            recorder.write("sentence_encoding", **line, clock="cpu")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
