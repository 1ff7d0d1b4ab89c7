"""Pre-training that learns: probes of a trained model, and the same run in transformers.

    python -m benchmarks.pretraining probe build/recipes/books      what a run has learned, on text that it did not see
    python -m benchmarks.pretraining beside                         the same weights, batches and masks in transformers
    python -m benchmarks.pretraining picture                        all stored curves in one picture
    python -m benchmarks.pretraining tables --write                 those of docs/pretraining.md

benchmarks/results/pretraining.jsonl has what was found: a line of each `beside`, and those of studies that are done,
whose programs have left: `learned`, `ablation`, `finetuned`, `memory`.
"""
