"""What training steps, matrix products and the tokenizer are meant to reach, beside what is stored.

    python -m benchmarks.goals [--results FOLDER]

Of bf16 on a GPU, at 4,096, 16,384 and 32,768 tokens of BERT-base and BERT-large; of fp32 on the CPU. Needs no GPU. A
ratio of times is taken from rounds in turn of one run; forward and backward count together.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.embedding.report import EMBEDDING_GOALS
from benchmarks.gemm_tuning import table as gemm_table
from benchmarks.kit import bert
from benchmarks.kit.goal import Figure, Figures, Goal, Line
from benchmarks.kit.results import RESULTS, read_folder
from benchmarks.tokenizers.goals import TOKENIZER_GOALS

TOKENS = sorted(bert.TOKENS)
WIDTHS = [(size.hidden, size.intermediate) for size in bert.SIZES]
RUN_LENGTHS = ("single_books", "squad_windows_384_stride128", "packed_nsp_512")
CHUNK = 2048  # about as many rows of logits as are made at once
CPU_RUNS = ("run/minilm/sms", *(f"run/minilm/mlm/{lengths}" for lengths in RUN_LENGTHS))
CPU_FAMILIES = ("linear", "linear_gelu", "mlp", "qkv_projection", "linear_cross_entropy")


def library_rate(lines: Sequence[Line]) -> Iterator[Figure]:
    """Rate of our fastest tile over the library's, of the products of the forward pass."""
    products: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line.get("kind") == "gemm":
            products.setdefault((line["product"], line["layout"], line["m"], line["n"], line["k"]), []).append(line)
    for hidden, wide in WIDTHS:
        shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        wanted = [(name, m, n, k) for name, (n, k) in shapes.items() for m in TOKENS]
        wanted.append(("vocabulary", CHUNK, bert.VOCAB_SIZE, hidden))
        for name, m, n, k in wanted:
            _, ours = gemm_table.best(products.get(("plain", "nt", m, n, k), []))
            yield Figure(f"{name} {m}x{n}x{k}", ours and ours["speedup_over_library"])


def speedup(family: str, provider: str, variant: str) -> Callable[[Sequence[Line]], Iterator[Figure]]:
    """Time of another contestant over bert_fast's, of a family's cases at all sizes."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        for case, shape in _cases(family, variant):
            found = _newest(lines, case, provider)
            theirs = sum(line["us"] for line in found)
            ours = sum(line["us"] / line["bert_fast_speedup"] for line in found)
            yield Figure(shape, theirs / ours if found else None)

    return figures


def memory(family: str, provider: str, variant: str) -> Callable[[Sequence[Line]], Iterator[Figure]]:
    """bert_fast's memory beyond inputs over another contestant's, of the same run."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        for case, shape in _cases(family, variant):
            theirs = _newest(lines, case, provider)
            run = theirs[-1]["run"] if theirs else None
            ours = [line for line in _newest(lines, case, "bert_fast") if line["run"] == run]
            is_there = theirs and ours and theirs[-1].get("peak_bytes") and ours[-1].get("peak_bytes")
            yield Figure(shape, ours[-1]["peak_bytes"] / theirs[-1]["peak_bytes"] if is_there else None)

    return figures


def _cases(family: str, variant: str) -> Iterator[tuple[str, str]]:
    outputs = {
        "linear_gelu": lambda hidden, wide: wide,
        "qkv_projection": lambda hidden, wide: 3 * hidden,
        "linear_cross_entropy": lambda hidden, wide: bert.VOCAB_SIZE,
    }
    for hidden, wide in WIDTHS:
        for tokens in TOKENS:
            shape = f"{tokens}x{hidden}x{outputs[family](hidden, wide)}"
            yield f"kernel/{family}/{shape}/bf16/{variant}", shape


def _newest(lines: Sequence[Line], case: str, provider: str) -> list[Line]:
    """A contestant's lines of every mode, from the newest run that has any."""
    found = [
        line for line in lines
        if line.get("kind") == "timing" and line["case"] == case and line["provider"] == provider
    ]  # fmt: skip
    return list({line["mode"]: line for line in found if line["run"] == found[-1]["run"]}.values())


def on_the_cpu(lines: Sequence[Line]) -> Iterator[Figure]:
    """Stock PyTorch's time over that of the torch back-end, of all cases; both passes of one run together."""
    for family in CPU_FAMILIES:
        found = [line for line in lines if line.get("family") == family and line.get("provider") == "eager"]
        cases = dict.fromkeys(line["case"] for line in found if line.get("kind") == "timing")
        if not cases:
            yield Figure(family, None)
        for case in cases:
            newest = {line["mode"]: line for line in found if line["case"] == case}.values()
            ours = sum(line["us"] / line["bert_fast_speedup"] for line in newest)
            yield Figure(case.removeprefix("kernel/"), sum(line["us"] for line in newest) / ours)


def whole_runs(lines: Sequence[Line]) -> Iterator[Figure]:
    """Our Trainer's tokens/s over transformers', times the share of real tokens in what transformers computes."""
    for case in CPU_RUNS:
        found = [line for line in lines if line.get("case") == case]
        yield Figure(case.removeprefix("run/"), found[-1]["ratio"] * found[-1]["fill"] if found else None)


def saved_share(lines: Sequence[Line]) -> Iterator[Figure]:
    """Bytes that a layer keeps, over those of Hugging Face's eager layer."""
    found = [line for line in lines if line.get("case") == "saved_bytes_per_layer/base/B8/S512"]
    yield Figure("base, 8 x 512 tokens", found[-1]["share_of_eager"] if found else None)


def step_rate(case: str, field: str = "sequences_per_s", provider: str = "bert_fast") -> Figures:
    """A field of a training step's newest line."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        found = [line for line in lines if line.get("kind") == "step" and line["case"] == case]
        values = [line[field] for line in found if line["provider"] == provider and line.get(field) is not None]
        yield Figure(case.removeprefix("step/"), values[-1] if values else None)

    return figures


_STEP_512, _STEP_LARGE = "step/base/full@512/B64", "step/large/even@512/B64"
_FULL = ("linear_cross_entropy", "hf_full_positions", "labelled")
_OVER_COMPILED = step_rate(_STEP_512, "bert_fast_speedup", "compiled")
_OVER_SDPA = step_rate(_STEP_LARGE, "bert_fast_speedup", "sdpa")
GOALS = (
    Goal("training steps of BERT-large, even lengths", 1070, step_rate(_STEP_LARGE), unit=" sequences/s"),
    Goal("training steps of BERT-base at 128", 7300, step_rate("step/base/full@128/B256"), unit=" sequences/s"),
    Goal("training steps of BERT-base at 512", 1560, step_rate(_STEP_512), unit=" sequences/s"),
    Goal("training steps at full lengths over transformers' compiled", 1.5, _OVER_COMPILED),
    Goal("training steps at even lengths over transformers' SDPA", 3.0, _OVER_SDPA),
    Goal("our matrix product, of the library's rate", 0.85, library_rate, unit="%"),
    Goal("linear_gelu over library + compiled kernel", 1.2, speedup("linear_gelu", "compiled", "erf")),
    Goal("qkv_projection over one library call", 1.0, speedup("qkv_projection", "one_linear", "joined")),
    Goal("qkv_projection over three library calls", 1.15, speedup("qkv_projection", "eager", "joined")),
    Goal("linear_cross_entropy over logits at every position", 3.0, speedup(*_FULL)),
    Goal("linear_cross_entropy's memory, of logits at every position", 0.1, memory(*_FULL), is_upper=True, unit="%"),
    Goal("linear_cross_entropy over Liger's", 1.1, speedup("linear_cross_entropy", "liger", "labelled")),
    Goal("CPU: the torch back-end over stock PyTorch", 1.0, on_the_cpu, "cpu"),
    Goal("CPU: a whole training run over transformers', times fill", 0.9, whole_runs, "cpu"),
    Goal("what a layer keeps for backward, of the eager layer", 0.35, saved_share, "cpu", is_upper=True, unit="%"),
    *EMBEDDING_GOALS,
    *TOKENIZER_GOALS,
)


def report(results: Path) -> list[str]:
    """A line for each goal and machine, then one for each figure."""
    machines: dict[str, list[Line]] = {}
    for line in read_folder(results):
        machines.setdefault(line.get("gpu") or "cpu", []).append(line)
    lines: list[str] = []
    for goal in GOALS:
        names = [name for name in machines if (name == "cpu") == (goal.device == "cpu")]
        for name in names or [goal.device]:
            lines += _of_goal(goal, name, list(goal.figures(machines.get(name, []))))
    return lines


def _of_goal(goal: Goal, machine: str, figures: Sequence[Figure]) -> list[str]:
    known = [figure.value for figure in figures if figure.value is not None]
    missed = sum(not goal.is_met(value) for value in known)
    state = f"missed by {missed} of {len(figures)}" if missed else f"met by {len(known)} of {len(figures)}"
    if not known:
        state = "owed"
    elif len(known) < len(figures):
        state += f", {len(figures) - len(known)} owed"
    bound = f"{'at most' if goal.is_upper else 'at least'} {goal.shown(goal.bound)}"
    lines = [f"{goal.title} ({bound}; {machine}): {state}"]
    for figure in figures if known else ():
        if figure.value is None:
            lines.append(f"    {figure.what:46} owed")
        else:
            verdict = "met" if goal.is_met(figure.value) else "MISSED"
            lines.append(f"    {figure.what:46} {goal.shown(figure.value):>8}  {verdict}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results; default: %(default)s")
    print("\n".join(report(parser.parse_args(arguments).results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
