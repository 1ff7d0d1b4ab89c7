"""Pre-training that learns: probes of a trained model, the same run in transformers, parts switched on and off.

    python -m benchmarks.pretraining probe build/recipes/books      what a run has learned, on text that it did not see
    python -m benchmarks.pretraining beside                         the same weights, batches and masks in transformers
    python -m benchmarks.pretraining ablations                      curves of runs that differ in one part each
    python -m benchmarks.pretraining finetuned build/recipes/books  tasks from these weights, and from random ones
    python -m benchmarks.pretraining memory                         the process over 5,000 batches
    python -m benchmarks.pretraining picture                        all stored curves in one picture
    python -m benchmarks.pretraining tables --write                 those of docs/pretraining.md

Each stores JSON lines in benchmarks/results/pretraining.jsonl.
"""
