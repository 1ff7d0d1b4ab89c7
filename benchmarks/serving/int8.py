"""Measures `bert_fast.quantize` and bf16 on a CPU: their speed, and what vectors of rounded products are worth.

    python -m benchmarks.serving.int8                  half an hour; appends to results/serving.jsonl
    python -m benchmarks.serving.int8 --only quality --dry-run
    python -m benchmarks.serving.int8 --tables [--write]    the tables of docs/serving.md; --write puts them there

Speed: the cases of `benchmarks.serving`, random weights, one thread, CPU time of the process, in turn; how far hidden
states are from transformers' is in the line. Quality: all-MiniLM-L6-v2, means of hidden states of at most 256 tokens,
of unit length. XQuAD's 1,190 English questions look for the one of 240 paragraphs that answers them; 256 film reviews
are vectors alone. ONNX Runtime and OpenVINO are not measured.
"""

import copy
import json
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import bert_fast
from benchmarks.kit import markdown
from benchmarks.kit.clock import interleaved
from benchmarks.kit.results import DATA, ROOT
from benchmarks.kit.study import Job, Line, Study
from benchmarks.recipes.data import minilm
from benchmarks.serving import report
from benchmarks.serving.cases import CASES, MODELS, Case, cases, reviews
from benchmarks.serving.contestants import Run, model_of

ROUNDS = 5
OURS, FP32, PLAIN, THEIRS = "bert_fast int8", "bert_fast", "transformers", "torch dynamic int8"
BF16, AUTOCAST = "bert_fast bf16", "bert_fast autocast"
THEIR_BF16, THEIR_AUTOCAST = "transformers bf16", "transformers autocast"
INT8_TABLE, BF16_TABLE = (OURS, FP32, PLAIN, THEIRS), (BF16, AUTOCAST, FP32, THEIR_BF16, THEIR_AUTOCAST)
MAX_LENGTH, TEXTS_AT_ONCE, RANKS = 256, 64, 10


class UnderAutocast:
    """A model that is called under autocast in bf16."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def __call__(self, **batch: Tensor) -> Any:
        """The model's output; weights are rounded in each call, as where each request has a context of its own."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def contestants(model: Any) -> dict[str, Any]:
    """Of transformers' model, in fp32, in 8 bits and in bf16; it is not changed."""
    fused = bert_fast.fuse(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch will take it away
        dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    halved = copy.deepcopy(model).bfloat16()
    return {
        OURS: bert_fast.quantize(copy.deepcopy(fused)), FP32: fused, PLAIN: model, THEIRS: dynamic,
        BF16: bert_fast.fuse(copy.deepcopy(halved)), AUTOCAST: UnderAutocast(fused),
        THEIR_BF16: halved, THEIR_AUTOCAST: UnderAutocast(model),
    }  # fmt: skip


@lru_cache(maxsize=1)
def _random(model: str) -> dict[str, Any]:
    return contestants(model_of(MODELS[model][0]))


def _speed(model: str, case_name: str, options: Namespace) -> Iterator[Line]:
    torch.set_num_threads(1)
    found = speed(_random(model), cases(MODELS[model][1])[case_name], options.rounds)
    yield {"kind": "serving_int8", "case": f"int8/{model}/{case_name}", "threads": 1, **found, "clock": "cpu"}


def speed(models: dict[str, Any], case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, how many times as long as ours, and how far hidden states are from fp32's, relative."""
    batches = case.padded()

    def run_of(model: Any) -> Run:
        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(**batch).last_hidden_state for batch in batches]

        return run

    runs = {name: run_of(model) for name, model in models.items()}
    kept = [batch["attention_mask"].bool() for batch in batches]
    states = {name: torch.cat([one[mask] for one, mask in zip(run(), kept, strict=True)]) for name, run in runs.items()}
    times = interleaved(runs, rounds, warmup=1, clock=time.process_time)
    return {
        "entrants": {
            name: {
                "ms": round(one.median * 1e3, 3),
                "int8_ratio": round(times[OURS].speedup_over(one), 3),
                "error": round(float((states[name] - states[PLAIN]).norm() / states[PLAIN].norm()), 5),
            }
            for name, one in times.items()
        },
        "texts": len(case.lengths),
        "tokens": sum(case.lengths),
        "simd_level": bert_fast.native.load().simd_level(),
        "rounds": rounds,
    }


def questions_and_paragraphs() -> tuple[list[str], list[str], Tensor]:
    """Questions, paragraphs, and the number of each question's paragraph. OSError where they are not there."""
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    asked = [(one["question"], place) for place, paragraph in enumerate(paragraphs) for one in paragraph["qas"]]
    questions, places = zip(*asked, strict=True)
    return list(questions), [paragraph["context"] for paragraph in paragraphs], torch.tensor(places)


def vectors(model: Any, texts: list[list[int]]) -> Tensor:
    """Means of hidden states, of unit length, [N, H]; texts of token ids are sorted into batches."""
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    made = torch.empty(len(texts), model.config.hidden_size)
    for first in range(0, len(order), TEXTS_AT_ONCE):
        places = order[first : first + TEXTS_AT_ONCE]
        (batch,) = Case("", [[texts[place] for place in places]]).padded()
        with torch.inference_mode():
            states = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"][..., None]
        made[places] = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    return made


def quality(models: dict[str, Any], questions: Any, paragraphs: Any, answers: Tensor, others: Any) -> dict[str, Any]:
    """Figures of each model: how far its vectors and scores are from fp32's, and how well questions find paragraphs."""
    found = {
        name: [vectors(model, texts) for texts in (questions, paragraphs, others)] for name, model in models.items()
    }
    fp32 = found[PLAIN]
    entrants = {}
    for name, made in found.items():
        scores, expected = made[0] @ made[1].T, fp32[0] @ fp32[1].T
        own = scores.gather(1, answers[:, None])
        ranks = (scores > own).sum(1)
        cosines = torch.cat([(one * other).sum(1) for one, other in zip(made, fp32, strict=True)])
        gains = torch.where(ranks < RANKS, 1 / torch.log2(ranks + 2.0), 0.0)
        figures = {
            "ndcg_at_10": gains.mean(), "recall_at_1": (ranks == 0).float().mean(), "mean_cosine": cosines.mean(),
            "least_cosine": cosines.min(), "spearman": spearman(scores.flatten(), expected.flatten()),
        }  # fmt: skip
        entrants[name] = {figure: round(float(value), 5) for figure, value in figures.items()}
    return {"entrants": entrants, "texts": sum(len(one) for one in fp32)}


def spearman(left: Tensor, right: Tensor) -> float:
    """Correlation of ranks; ties, which fp32 scores hardly have, in any order."""
    ranks = torch.stack([one.argsort().argsort() for one in (left, right)]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def _quality(options: Namespace) -> Iterator[Line]:
    import transformers

    torch.set_num_threads(1)
    tokenizer = bert_fast.BertTokenizer.from_pretrained(minilm())
    model = transformers.BertModel.from_pretrained(minilm(), add_pooling_layer=False).eval()
    questions, paragraphs, answers = questions_and_paragraphs()
    texts = [list(map(list, tokenizer(given, truncation=True, max_length=MAX_LENGTH)["input_ids"]))
             for given in (questions, paragraphs)]  # fmt: skip
    found = quality(contestants(model), *texts, answers, reviews())
    yield {"kind": "quality_int8", "case": "int8/MiniLM/quality", "threads": 1, **found}


def _jobs(options: Namespace) -> dict[str, Job]:
    return {"quality": partial(_quality, options)} | {
        f"{model}/{case}": partial(_speed, model, case, options) for model in MODELS for case in CASES
    }


def tables(path: Any) -> dict[str, str]:
    """Markdown of what is stored: milliseconds of ours and, of all, how many times as long; quality."""
    order = [f"int8/{model}/{case}" for model in MODELS for case in CASES]
    lines = sorted(report.newest("serving_int8", path), key=lambda line: order.index(line["case"]))
    quality_rows = [
        (
            name, f"{one['ndcg_at_10']:.4f}", f"{one['recall_at_1']:.4f}", f"{one['spearman']:.4f}",
            f"{one['mean_cosine']:.4f}", f"{one['least_cosine']:.4f}",
        )
        for line in report.newest("quality_int8", path) for name, one in line["entrants"].items()
    ]  # fmt: skip
    figures = "nDCG@10", "recall@1", "Spearman of scores to fp32", "mean cosine to fp32", "least cosine"
    return {
        "int8_speed": _speed_table(lines, "int8", INT8_TABLE),
        "bf16_speed": _speed_table(lines, "bf16", BF16_TABLE),
        "int8_quality": markdown.table(("", *figures), quality_rows),
    }


def _speed_table(lines: list[Line], ours: str, names: tuple[str, ...]) -> str:
    rows = []
    for line in lines:
        times = [line["entrants"][name]["ms"] for name in names]
        what = line["case"].removeprefix("int8/").replace("/", ", ")
        rows.append((what, f"{times[0]:.1f}", *[f"{time / times[0]:.2f}" for time in times[1:]]))
    return markdown.table(("model, case", f"{ours}, ms", *names[1:]), rows)


STUDY = Study(
    "serving.int8", __doc__, report.PATH, _jobs, tables=tables, page=ROOT / "docs" / "serving.md", rounds=ROUNDS,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
