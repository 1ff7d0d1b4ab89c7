"""What the demo finds: checks and speeds, printed as they come, and written to a page at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bert_fast.bench.measuring import Timing, timed
from bert_fast.bench.page import Html, figure, page, section, table, tagged
from bert_fast.bench.picture import Bar, Group, Picture, as_svg, as_text
from bert_fast.bench.report import device_name, measured_on

_NOTES = (
    "Speeds are medians over rounds in which all took turns. Tokens are real ones: padding does not count. A training "
    "step is forward, backward and AdamW on a padded batch. Memory is what autograd holds after the forward pass: "
    "distinct storages, without parameters.",
    "The weights have no masked-LM head. It starts untrained, the same on both sides, so the loss starts near that of "
    "guessing (ln 30,522 = 10.3). A few steps show that training follows the reference; they make no good model.",
    "The reference is the textbook model by which fast paths are judged, not one built for speed. transformers draws "
    "other dropout masks, so its losses are not compared; it took part in the first training steps alone.",
)


@dataclass(frozen=True)
class Check:
    """One claim: what is compared, what was found, what was expected, and whether it holds."""

    name: str
    found: str
    expected: str
    passed: bool


@dataclass
class Findings:
    """Rows of the tables, bars of the picture and further sections of the page."""

    device: torch.device
    is_quick: bool = False
    checks: list[Check] = field(default_factory=list)
    measured: list[tuple[str, ...]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    sections: list[Html] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def check(self, name: str, found: str, expected: str, passed: bool) -> None:
        """Notes a claim."""
        self.checks.append(Check(name, found, expected, passed))
        print(f"  {'ok' if passed else 'FAILED'}: {name}: {found} (expected: {expected})", flush=True)

    def check_at_most(self, name: str, value: float, limit: float) -> None:
        """Notes a difference that must not exceed a limit; NaN fails."""
        self.check(name, f"{value:.2g}", f"≤ {limit:.0e}", value <= limit)

    def speed(self, what: str, ours: Timing, peer: str, theirs: Timing) -> None:
        """Notes tokens per second of both, and the median over rounds of how many times as fast ours is."""
        ratio = ours.speedup_over(theirs)
        rates = [f"{float(f'{timing.tokens_per_s:.3g}'):,.0f} tokens/s" for timing in (ours, theirs)]
        self.measured.append((what, rates[0], peer, rates[1], f"{ratio:.2f}x"))
        if peer.startswith("transformers"):
            self.bars.append(Bar(what, ratio))
        print(f"  {what}: {rates[0]}; {peer} {rates[1]}: {ratio:.2f}x", flush=True)

    def memory(self, what: str, ours: int, peer: str, theirs: int) -> None:
        """Notes the bytes that both hold."""
        cells = [f"{count / 1e6:,.0f} MB" for count in (ours, theirs)]
        self.measured.append((what, cells[0], peer, cells[1], f"{ours / theirs:.0%}"))
        print(f"  {what}: {cells[0]}; {peer} {cells[1]}: {ours / theirs:.0%}", flush=True)

    def section(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for the page alone."""
        self.sections.append(section(title, table(head, rows)))

    def picture(self) -> Picture:
        """The speeds beside transformers, drawn as `bert-fast bench` draws them."""
        notes = [f"1x is transformers with SDPA. {device_name(self.device)}, fp32."]
        notes += ["A quick run: too short for times that mean anything."] if self.is_quick else []
        return Picture("Tokens per second of bert_fast", (Group("MiniLM: 6 layers", tuple(self.bars)),), tuple(notes))

    def finish(self, path: Path) -> None:
        """Prints the picture and writes the page."""
        picture = self.picture()
        print("\n" + as_text(picture))
        total, failed = len(self.checks), len(self.failed)
        verdict = f"{failed} of {total} checks failed" if failed else f"all {total} checks passed"
        claims = [
            (one.name, one.found, one.expected, "ok" if one.passed else tagged("b", "FAILED", "failed"))
            for one in self.checks
        ]
        caption = "Blue: bert_fast. Grey: transformers, given the same padded batches, which is 1."
        text = page(
            title="bert_fast demo",
            text="Real text (the Python language reference) and real weights (MiniLM), measured on this machine.",
            verdict=verdict,
            is_good=not failed,
            sections=[
                figure(picture.title, Html(as_svg(picture)), caption),
                section("Checked", table(("", "found", "expected", ""), claims)),
                section("Measured", table(("", "bert_fast", "compared with", "", "ratio"), self.measured, (1, 3, 4))),
                *self.sections,
                section("How to read this", Html("".join(tagged("p", note) for note in _NOTES))),
                section("Measured on", table((), measured_on(self.device))),
            ],
        )
        path.write_text(text, encoding="utf-8")
        print(f"{verdict}; the report: {path}")


def in_turn(
    contestants: Sequence[Callable[[], object]], tokens: int, rounds: int, device: torch.device
) -> list[Timing]:
    """Times every contestant in every round, A B C A B C ..., so that a machine's moods hit all alike.

    Each was called before, so that its first round is like the others. tokens: that one call gets through.
    """
    seconds = [[timed(run, device) for run in contestants] for _ in range(rounds)]
    return [Timing((tokens,) * rounds, of_one) for of_one in zip(*seconds, strict=True)]
