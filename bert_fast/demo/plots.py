"""The report's plots, as SVG text to be put into a page."""

from typing import TYPE_CHECKING

from bert_fast.demo.results import DemoResults, rate, times
from bert_fast.demo.settings import LOSS_TOLERANCE
from bert_fast.training.reporting.drawing import BAD, MAIN, bars, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["length_plot", "loss_plot", "speed_plot"]

PEER, REFERENCE = "#aab4bd", "#f0a860"


def loss_plot(results: DemoResults) -> str:
    """Both loss curves, and below them how far they are apart."""
    losses, reference = results.training.losses, results.training.reference_losses
    steps = range(1, len(losses) + 1)
    distances = [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]

    def draw(figure: "Figure") -> None:
        curves, distance = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
        curves.plot(steps, reference, color=REFERENCE, linewidth=6, solid_capstyle="round", label="reference")
        curves.plot(steps, losses, color=MAIN, linewidth=1.6, marker="o", markersize=3, label="bert_fast")
        curves.set_ylabel("masked-LM loss")
        curves.legend(frameon=False)
        curves.grid(axis="y")
        # exactly equal losses have no place on a logarithmic axis: they are drawn at its foot
        floor = 1e-9
        distance.plot(steps, [max(value, floor) for value in distances], color=MAIN, marker=".", linewidth=0.8)
        distance.axhline(LOSS_TOLERANCE, color=BAD, linewidth=1, linestyle="--")
        distance.text(1, LOSS_TOLERANCE * 1.6, f"allowed: {LOSS_TOLERANCE:.0e}", color=BAD, fontsize=8.5)
        distance.set_yscale("log")
        distance.set_ylim(floor, 3e-3)
        distance.set_ylabel("relative\ndistance")
        distance.set_xlabel("step")
        distance.set_xlim(0.5, len(losses) + 0.5)
        distance.xaxis.get_major_locator().set_params(integer=True)
        distance.grid(axis="y")

    return svg(draw, 5.3, 4.1)


def speed_plot(results: DemoResults) -> str:
    """Tokens per second of everybody, one panel a step."""
    inference, training = results.inference, results.training
    panels = (
        ("Tokenize", (("bert_fast", results.tokenizer.ours), ("tokenizers", results.tokenizer.theirs))),
        (
            "Encode",
            (
                ("bert_fast, packed", inference.packed),
                ("bert_fast, padded", inference.padded),
                ("transformers", inference.theirs),
            ),
        ),
        (
            "Training step",
            (("bert_fast", training.ours), ("reference", training.reference), ("transformers", training.theirs)),
        ),
    )

    def draw(figure: "Figure") -> None:
        all_axes = figure.subplots(len(panels), 1, height_ratios=[len(contestants) + 0.6 for _, contestants in panels])
        for axes, (title, contestants) in zip(all_axes, panels, strict=True):
            names, timings = zip(*contestants, strict=True)
            rates = [timing.tokens_per_s for timing in timings]
            labels = [
                f"{rate(timing.tokens_per_s)}   ({times(timing.speedup_over(timings[-1]))} {names[-1]})"
                if name.startswith("bert_fast")
                else rate(timing.tokens_per_s)
                for name, timing in contestants
            ]
            colors = [
                MAIN if name.startswith("bert_fast") else REFERENCE if name == "reference" else PEER for name in names
            ]
            bars(axes, names, rates, labels, colors)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.set_xlim(0, max(rates) * 1.8)  # room for the labels
            axes.set_title(f"{title}: {'' if title == 'Tokenize' else 'real '}tokens/s")

    return svg(draw, 5.3, 4.1)


def length_plot(results: DemoResults) -> str:
    """How long the passages are, and what padding a batch to its longest would make of it."""
    lengths, limit = results.tokenizer.lengths, results.settings.max_length
    inference = results.inference

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.hist([min(length, limit) for length in lengths], bins=range(0, limit + 9, 8), color=MAIN, alpha=0.85)
        axes.set_xlabel(f"tokens of a passage (cut off at {limit})")
        axes.set_ylabel("passages")
        axes.set_xlim(0, limit + 8)
        axes.grid(axis="y")
        note = (
            f"fill {inference.fill:.2f}\n{inference.real_tokens:,} real tokens in\n"
            f"{inference.padded_tokens:,} padded ones\n(batches of {inference.batch_size})"
        )
        axes.text(0.9, 0.95, note, transform=axes.transAxes, ha="right", va="top", linespacing=1.5)

    return svg(draw, 5.3, 2.9)
