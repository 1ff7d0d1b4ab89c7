"""What `bert-fast bench` leaves: a page with the picture, the figures behind it and what they were measured on."""

from collections.abc import Sequence

from bert_fast.bench.cases import draw
from bert_fast.bench.measuring import Result
from bert_fast.bench.picture import Picture, as_svg
from bert_fast.demo.environment import Environment
from bert_fast.training.reporting.page import Html, figure, page, section, table

__all__ = ["picture_of", "render_page"]


def picture_of(results: Sequence[Result], device: str, is_quick: bool) -> Picture:
    """The picture of what was measured."""
    ratios = {result.case: result.ratio for result in results}
    share = min(result.share for result in results)
    notes = (
        f"1x is the same model untouched. {device}.",
        f"Padded batch: texts of several lengths, down to {share:.0%} of the positions hold a token.",
        *(("A quick run: too short for times that mean anything.",) if is_quick else ()),
    )
    return draw(ratios.__getitem__, tuple(ratios), notes)


def render_page(results: Sequence[Result], picture: Picture, environment: Environment, wrong: Sequence[Result]) -> str:
    """The whole page. wrong: results whose two models disagree."""
    rows = [
        (
            result.case.size.name, result.case.label, f"{result.share:.0%}", f"{result.fused.tokens_per_s:,.0f}",
            f"{result.untouched.tokens_per_s:,.0f}", f"{result.ratio:.2f}x", str(len(result.fused.seconds)),
            f"{result.difference:.1g}",
        )
        for result in results
    ]  # fmt: skip
    head = ("model", "what", "tokens", "fused, tokens/s", "untouched, tokens/s", "ratio", "rounds", "difference")
    caption = (
        "Blue: the fused model. Grey: the same model untouched, which is 1. Both take turns on the same batch; a ratio "
        "is the median over rounds. Tokens: the share of the batch's positions that hold one. Difference: the largest "
        "between both models' hidden states, which are about 1 in size."
    )
    return page(
        title="bert_fast bench",
        text="transformers' BertModel before and after bert_fast.fuse, measured on this machine: "
        f"{environment.device}, {environment.time}.",
        verdict=f"{len(wrong)} of {len(results)} comparisons disagree" if wrong else "both models agree",
        is_good=not wrong,
        sections=(
            figure(picture.title, Html(as_svg(picture)), caption),
            section("Figures", Html(f'<div class="scroll">{table(head, rows, range(2, 8))}</div>')),
            section("Measured on", table((), environment.lines())),
        ),
    )
