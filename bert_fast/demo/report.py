"""What the report says: results as sections of a page."""

from collections.abc import Sequence

from bert_fast.demo.plots import length_plot, loss_plot, speed_plot
from bert_fast.demo.results import DemoResults, rate, times
from bert_fast.demo.search import Answer
from bert_fast.training.reporting.page import (
    Html,
    cards,
    columns,
    figure,
    joined,
    notes,
    page,
    section,
    table,
    tagged,
)  # fmt: skip

__all__ = ["render_report"]


def render_report(results: DemoResults) -> str:
    """The whole page."""
    num_failed, num_checks = len(results.failed), len(results.checks)
    environment = results.environment
    return page(
        title="bert_fast demo",
        text="Real text (the Python language reference), real weights (MiniLM-L6, a 6-layer BERT), measured on this "
        f"machine: {environment.device}, {environment.time}."
        + (" A quick run, too short for times that mean anything." if results.settings.is_quick else ""),
        verdict=f"{num_failed} of {num_checks} checks failed" if num_failed else f"all {num_checks} checks passed",
        is_good=not num_failed,
        sections=(
            _headline(results),
            columns(
                (
                    figure("Speed", Html(speed_plot(results)), _speed_caption(results)),
                    figure("Training beside the reference", Html(loss_plot(results)), _loss_caption(results)),
                )
            ),
            section("Measured", _measured(results)),
            section("Checked", _checked(results)),
            section("Search by meaning", _answers(results.search.answers)),
            columns(
                (
                    figure("Lengths of the passages", Html(length_plot(results)), _length_caption(results)),
                    section("How to read this", notes(_notes(results))),
                )
            ),
            section("Environment", table((), environment.lines())),
        ),
    )


def _headline(results: DemoResults) -> Html:
    tokenizer, inference, training = results.tokenizer, results.inference, results.training
    ids = "the same ids" if tokenizer.first_difference is None else "but DIFFERENT ids"
    share = training.model_bytes.ours / training.model_bytes.theirs
    return cards(
        (
            (times(tokenizer.ours.speedup_over(tokenizer.theirs)), f"as fast as Hugging Face tokenizers, {ids}"),
            (
                times(inference.padded.speedup_over(inference.theirs)),
                f"as fast as transformers' encoder, given the same padded batches ({inference.fill:.0%} real tokens)",
            ),
            (times(training.ours.speedup_over(training.theirs)), "as fast as transformers in a training step"),
            (f"{share:.0%}", "of the memory that transformers keeps for backward in that step"),
        )
    )


def _speed_caption(results: DemoResults) -> str:
    training = results.training
    return (
        "Medians over rounds in which all took turns. Real tokens: padding does not count. Training step: forward, "
        f"backward and AdamW on padded batches of {training.batch_size} passages ({training.fill:.0%} real tokens)."
    )


def _loss_caption(results: DemoResults) -> str:
    training = results.training
    return (
        f"AdamW, learning rate {training.learning_rate:g}, dropout {training.dropout_p:g}, 15 % of the tokens masked; "
        "the same weights, batches and dropout seeds on both sides. Largest relative distance of the losses: "
        f"{training.largest_difference:.1e}."
    )


def _length_caption(results: DemoResults) -> str:
    return (
        f"{results.tokenizer.num_passages:,} passages, {sum(results.tokenizer.lengths):,} tokens. Batches are padded "
        "to their longest passage; the padding is work that bert_fast leaves out."
    )


def _measured(results: DemoResults) -> Html:
    rows = [(f"{row.what} ({row.unit})", row.ours, row.peer, row.theirs, row.ratio) for row in results.rows]
    return table(("", "bert_fast", "compared with", "", "ratio"), rows, numeric=(1, 3, 4))


def _checked(results: DemoResults) -> Html:
    rows = []
    for check in results.checks:
        mark = tagged("span", "ok", "passed") if check.passed else tagged("span", "FAILED", "failed")
        rows.append((check.name, check.found, check.expected, mark))
    return table(("", "found", "expected", ""), rows)


def _answers(answers: Sequence[Answer]) -> Html:
    blocks = []
    for answer in answers:
        hits = (
            joined(
                (
                    tagged("b", hit.passage.heading),
                    tagged("span", f" {hit.score:.2f}", "score"),
                    tagged("p", hit.passage.text, "passage"),
                )
            )
            for hit in answer.hits
        )
        found = tagged("ol", joined(tagged("li", hit) for hit in hits))
        blocks.append(tagged("div", joined((tagged("p", answer.question, "question"), found))))
    return columns(blocks)


def _notes(results: DemoResults) -> tuple[str, ...]:
    training, found = results.training, results.search
    num_steps = len(training.losses)
    return (
        "MiniLM's checkpoint has no masked-LM head. Here the head starts untrained: random weights, the same on both "
        "sides, its decoder tied to the word embeddings. So the loss starts near that of guessing (ln 30,522 = 10.3).",
        f"{num_steps} steps show that training works and follows the reference; they make no good language model. "
        "The search uses the original weights.",
        "The reference is the textbook model that fast paths are judged by, not one built for speed. Like bert_fast, "
        "it runs the head on the masked tokens only.",
        "transformers draws dropout masks of its own, so its losses are not comparable. It took part in the first "
        f"{min(results.settings.peer_steps, num_steps)} training steps, of which the first is not timed.",
        "Memory is what autograd holds after a forward pass: distinct storages, without parameters.",
        f"Embedding all {found.num_passages:,} passages for the search took {found.seconds:.1f} s "
        f"({rate(found.tokens_per_s)} tokens/s, tokenizing included); the whole demo took {results.seconds:.0f} s.",
        f"The trained model ({results.checkpoint.num_bytes / 1e6:.0f} MB) is in checkpoint/, beside this page; "
        f"transformers opens it as {results.checkpoint.opened_as}.",
    )
