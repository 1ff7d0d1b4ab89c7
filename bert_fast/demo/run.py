"""The steps in order."""

import random
import time

import torch

from bert_fast.demo.checkpoint import save_and_reopen
from bert_fast.demo.environment import describe_environment
from bert_fast.demo.inference import compare_inference
from bert_fast.demo.output import OutputFolder
from bert_fast.demo.report import render_report
from bert_fast.demo.requirements import check_packages, weights_folder
from bert_fast.demo.results import DemoResults, rate, times
from bert_fast.demo.search import search
from bert_fast.demo.settings import Settings
from bert_fast.demo.terminal import Terminal
from bert_fast.demo.text import python_reference
from bert_fast.demo.tokenizing import compare_tokenizers
from bert_fast.demo.training import train
from bert_fast.models import BertModel
from bert_fast.tokenization import BertTokenizer

__all__ = ["run_demo"]


def run_demo(settings: Settings, output: OutputFolder, device: torch.device, terminal: Terminal) -> DemoResults:
    """Runs all five steps, prints as it goes, writes the report and the checkpoint.

    A failed check does not stop the others: see `DemoResults.failed`.

    Raises:
        DemoError: something that the demo needs is missing, or `output` belongs to someone else.
        CheckpointError, OSError: the output cannot be written.
    """
    start = time.perf_counter()
    check_packages()
    folder = weights_folder()
    passages = python_reference()
    if settings.max_passages is not None:
        passages = random.Random(settings.seed).sample(passages, min(settings.max_passages, len(passages)))
    output.claim()
    texts = [passage.text for passage in passages]
    environment = describe_environment(device)
    terminal.line(f"{environment.device}; text: Python's language reference; weights: MiniLM-L6 (real, 22.7 M)")

    terminal.heading(1, "Tokenize")
    tokenizer = BertTokenizer.from_pretrained(folder)
    tokenized = compare_tokenizers(folder, tokenizer, texts, settings.tokenizer_rounds, terminal.track)
    terminal.line(
        f"{tokenized.num_passages:,} passages, {tokenized.num_chars:,} characters; "
        f"ids equal to those of tokenizers: {tokenized.checks[0].found}"
    )
    terminal.line(
        f"bert_fast ({tokenized.implementation}) {rate(tokenized.ours.tokens_per_s)} tokens/s, "
        f"tokenizers {rate(tokenized.theirs.tokens_per_s)}: {times(tokenized.ours.speedup_over(tokenized.theirs))}"
    )

    terminal.heading(2, "Encode with the real weights")
    model = BertModel.from_pretrained(folder, device=device)
    inference = compare_inference(folder, model, tokenizer, texts, settings, terminal.track)
    terminal.line(
        f"{inference.num_batches} batches of {inference.batch_size}: {inference.fill:.0%} real tokens; "
        f"hidden states differ by at most {inference.largest_difference:.1e}"
    )
    terminal.line(
        f"real tokens/s: bert_fast {rate(inference.padded.tokens_per_s)}, transformers "
        f"{rate(inference.theirs.tokens_per_s)}: {times(inference.padded.speedup_over(inference.theirs))}; "
        f"bert_fast, packed input {rate(inference.packed.tokens_per_s)}"
    )

    terminal.heading(3, f"Train: masked LM, {settings.steps} steps, dropout on, beside the reference")
    trained, training = train(folder, tokenizer, texts, settings, device, terminal.track)
    terminal.line(
        f"loss {training.losses[0]:.2f} -> {training.losses[-1]:.2f} (the head starts untrained); "
        f"furthest from the reference: {training.largest_difference:.1e} relative"
    )
    terminal.line(
        f"real tokens/s: bert_fast {rate(training.ours.tokens_per_s)}, transformers "
        f"{rate(training.theirs.tokens_per_s)}: {times(training.ours.speedup_over(training.theirs))}; "
        f"reference {rate(training.reference.tokens_per_s)}"
    )

    terminal.heading(4, "Search by meaning")
    found = search(
        model, tokenizer, passages, settings.questions, settings.max_length, settings.search_tokens, terminal.track
    )
    terminal.line(
        f"{found.num_passages:,} passages embedded in {found.seconds:.1f} s, {rate(found.tokens_per_s)} tokens/s"
    )
    terminal.answers(found.answers)

    terminal.heading(5, "Save and report")
    saved = save_and_reopen(output.checkpoint, trained, tokenizer, texts[:8], settings.max_length, terminal.track)
    results = DemoResults(
        settings, environment, tokenized, inference, training, found, saved, time.perf_counter() - start
    )
    if settings.is_quick:
        terminal.line("a quick run: its times mean nothing")
    output.write_report(render_report(results))
    output.write_results(results.as_json())
    terminal.line(f"checkpoint: {output.checkpoint}, opens in transformers as {saved.opened_as}")
    terminal.line(f"report: {output.report}")
    terminal.summary(results)
    return results
