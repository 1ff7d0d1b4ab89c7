"""Measures encoders as they are served on a CPU: bert_fast beside transformers, ONNX Runtime and OpenVINO.

    python -m benchmarks.serving                    some minutes; appends to results/serving.jsonl
    python -m benchmarks.serving --only MiniLM/one --threads 1 --dry-run
    python -m benchmarks.serving --table            the table of docs/results.md, from the stored results

fp32, models of MiniLM's and BERT-base's form with random weights, real texts, all of them tokenized beforehand. Every
contestant is given the same padded batch and returns hidden states, which must agree; those that take packed input are
given the same texts without padding, too. Contestants take turns, wall time, medians; ratios are those within a round.
Packages that are not installed (`pip install bert_fast[serving]`) are named and left out.
"""

import argparse
import importlib.util
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kit import markdown
from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import DATA, RESULTS, Recorder, cpu_environment, read_lines

PATH = RESULTS / "serving.jsonl"
SIZES = {
    "MiniLM": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
    "BERT-base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
}
BATCH_SIZE = 32
TOLERANCE = 1e-3  # between fp32 hidden states, which are of size 1
PAUSE = 0.01  # seconds in which worker threads of the contestant before fall asleep
Batch = tuple[Tensor, Tensor]  # input_ids and attention_mask, [B, S]
Run = Callable[[], list[Tensor]]  # hidden states of every batch


class Case(NamedTuple):
    """What is encoded at a time: batches of token ids."""

    name: str
    batches: list[list[list[int]]]

    def padded(self) -> list[Batch]:
        """As padded batches."""
        made = []
        for batch in self.batches:
            rows = [torch.tensor(ids) for ids in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            made.append((ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()))
        return made

    @property
    def fill(self) -> float:
        """Share of the padded batches that is tokens."""
        return sum(len(ids) for batch in self.batches for ids in batch) / sum(
            len(batch) * max(map(len, batch)) for batch in self.batches
        )


def cases() -> list[Case]:
    """All of them. Raises OSError where the texts are not there."""
    from bert_fast import BertTokenizer

    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    tokenizer = BertTokenizer.from_pretrained(DATA / "vocab" / "bert-base-uncased")
    texts = [entry["question"] for paragraph in paragraphs for entry in paragraph["qas"]][::19][:48]
    texts += [paragraph["context"] for paragraph in paragraphs][:: max(1, len(paragraphs) // 16)][:16]
    mixed = [texts[index * 37 % len(texts)] for index in range(len(texts))]
    ids = [list(one)[:512] for one in tokenizer(mixed)["input_ids"]]
    stream = [token for one in ids for token in one[1:-1]]
    single = [Case(f"one_{length}", [[[101, *stream[: length - 2], 102]]]) for length in (31, 128, 512)]
    ordered = sorted(ids, key=len)
    parts = {
        name: [some[start : start + BATCH_SIZE] for start in range(0, len(some), BATCH_SIZE)]
        for name, some in (("as_they_come", ids), ("sorted", ordered))
    }
    return [*single, *(Case(name, batches) for name, batches in parts.items())]


def contestants(config: Any, model: Any, threads: int, compiles: bool) -> dict[str, Callable[[Case], Run]]:
    """What each makes of a case; those whose packages are not there are named on stderr."""
    import bert_fast

    fused = bert_fast.fuse(_copy(config, model))
    found = {"bert_fast": _of_torch(fused), "bert_fast packed": _of_packed(fused), "transformers": _of_torch(model)}
    if compiles:
        found["torch.compile"] = _of_torch(torch.compile(_copy(config, model), dynamic=True))
    if all(map(_is_there, ("onnx", "onnxruntime"))):
        exported = _exported(model)
        found["onnxruntime"] = _of_onnxruntime(exported, threads)
        found["onnxruntime optimized"] = _of_onnxruntime(_optimized(exported, config), threads)
        if _is_there("openvino"):
            found["openvino"] = _of_openvino(exported, threads)
    return found


def _is_there(package: str) -> bool:
    is_there = importlib.util.find_spec(package) is not None
    if not is_there:
        print(f"{package} is not installed: left out", file=sys.stderr)
    return is_there


def _copy(config: Any, model: Any) -> Any:
    import transformers

    copy = transformers.BertModel(config, add_pooling_layer=False).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def _of_torch(model: Any) -> Callable[[Case], Run]:
    def prepare(case: Case) -> Run:
        batches = case.padded()

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(input_ids=ids, attention_mask=mask).last_hidden_state for ids, mask in batches]

        return run

    return prepare


def _of_packed(model: Any) -> Callable[[Case], Run]:
    def prepare(case: Case) -> Run:
        packed = []
        for batch in case.batches:
            lengths = torch.tensor([0, *(len(ids) for ids in batch)])
            packed.append(
                dict(
                    input_ids=torch.tensor([token for ids in batch for token in ids]),
                    cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
                    max_seqlen=int(lengths.max()),
                )
            )

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [model(**batch).last_hidden_state for batch in packed]

        return run

    return prepare


def _exported(model: Any) -> bytes:
    import logging

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    file, dynamic = io.BytesIO(), {0: "batch", 1: "sequence"}

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            states: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return states

    ids = torch.ones(2, 16, dtype=torch.long)
    torch.onnx.export(
        Plain().eval(), (ids, ids), file, dynamo=False, opset_version=17, input_names=["input_ids", "attention_mask"],
        output_names=["states"], dynamic_axes={"input_ids": dynamic, "attention_mask": dynamic, "states": dynamic},
    )  # fmt: skip
    return file.getvalue()


def _optimized(exported: bytes, config: Any) -> bytes:
    """With ONNX Runtime's fused attention, GELU and LayerNorm."""
    import onnx
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    model = optimize_by_fusion(
        onnx.load_from_string(exported), "bert", config.num_attention_heads, config.hidden_size, FusionOptions("bert")
    )
    serialized: bytes = model.model.SerializeToString()
    return serialized


def _of_onnxruntime(exported: bytes, threads: int) -> Callable[[Case], Run]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])

    def prepare(case: Case) -> Run:
        inputs = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in case.padded()]
        return lambda: [torch.from_numpy(session.run(None, one)[0]) for one in inputs]

    return prepare


def _of_openvino(exported: bytes, threads: int) -> Callable[[Case], Run]:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(openvino.convert_model(io.BytesIO(exported)), "CPU", settings)

    def prepare(case: Case) -> Run:
        inputs = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in case.padded()]
        return lambda: [torch.from_numpy(compiled(one)[0].copy()) for one in inputs]

    return prepare


def measure(runs: dict[str, Run], case: Case, rounds: int) -> dict[str, Any]:
    """The figures of a case. Raises RuntimeError where hidden states do not agree."""
    masks = [mask.bool() for _, mask in case.padded()]
    expected = torch.cat([states[mask] for states, mask in zip(runs["transformers"](), masks, strict=True)])
    for name, run in runs.items():
        made = run()
        kept = torch.cat(made if made[0].dim() == 2 else [one[mask] for one, mask in zip(made, masks, strict=True)])
        error = float((kept - expected).abs().max())
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name}: expected hidden states within {TOLERANCE} of transformers', got {error:.1e}")

    times = interleaved(dict(runs), rounds, warmup=2, clock=_Paused())
    texts = sum(map(len, case.batches))
    ours = min((times[name] for name in runs if name.startswith("bert_fast")), key=lambda one: one.median)
    return {
        "entrants": {
            name: {"ms": round(one.median * 1e3, 3), "bert_fast_ratio": round(ours.speedup_over(one), 3)}
            for name, one in times.items()
        },
        "texts": texts,
        "fill": round(case.fill, 3),
    }


class _Paused:
    """Wall time, without a pause before each contestant."""

    def __init__(self) -> None:
        self._starts = True

    def __call__(self) -> float:
        if self._starts:
            time.sleep(PAUSE)
        self._starts = not self._starts
        return time.perf_counter()


def results(only: str, threads: Sequence[int], rounds: int, compiles: bool) -> Iterator[dict[str, Any]]:
    """The lines to store."""
    import transformers

    for size, numbers in SIZES.items():
        wanted = [case for case in cases() if only in f"{size}/{case.name}"]
        if not wanted:
            continue
        config = transformers.BertConfig(**numbers, attn_implementation="sdpa")
        torch.manual_seed(0)
        model = transformers.BertModel(config, add_pooling_layer=False).eval()
        for count in threads:
            torch.set_num_threads(count)
            prepared = contestants(config, model, count, compiles)
            for case in wanted:
                runs = {name: prepare(case) for name, prepare in prepared.items()}
                found = measure(runs, case, rounds)
                yield {"case": f"serving/{size}/{case.name}", "threads": count, **found, "rounds": rounds}


def table(path: Path = PATH) -> str:
    """The newest stored results as a table: how much longer others take than bert_fast."""
    newest = {(line["case"], line["threads"]): line for line in read_lines(path) if line.get("kind") == "serving"}
    names = dict.fromkeys(name for line in newest.values() for name in line["entrants"] if "bert_fast" not in name)
    rows = []
    for (case, threads), line in newest.items():
        entrants = line["entrants"]
        ours = min(entry["ms"] for name, entry in entrants.items() if name.startswith("bert_fast"))
        ratios = [f"{entrants[name]['bert_fast_ratio']:.2f}" if name in entrants else "" for name in names]
        rows.append((case.removeprefix("serving/").replace("/", ", "), str(threads), f"{ours:.2f}", *ratios))
    return markdown.table(("model, case", "threads", "bert_fast, ms", *names), rows)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name (MiniLM/one_31) holds this text")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds; default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: a minute more a model")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    parser.add_argument("--table", action="store_true", help="print what is stored as a table")
    options = parser.parse_args(arguments)
    if options.table:
        print(table())
        return 0
    recorder = Recorder(PATH, cpu_environment())
    for line in results(options.only, options.threads, options.rounds, options.compile):
        ratios = "  ".join(f"{name} {entry['bert_fast_ratio']:.2f}" for name, entry in line["entrants"].items())
        print(f"{line['case']:<36} {line['threads']} threads  {ratios}", flush=True)
        if not options.dry_run:
            recorder.write("serving", **line, clock="wall")
    return 0


if __name__ == "__main__":
    sys.exit(main())
