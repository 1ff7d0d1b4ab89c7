"""Benchmarks: what is timed, where, and what of it is stored. docs/benchmarks.md has the commands and the figures.

registry.py       THE list of cases
families/         the kernel cases of each op, `<op>.py`
kernels/          one kernel case: right, repeatable, timed beside its contestants; what a device can reach
models/           whole models and training runs beside transformers', single pieces on a CPU
tokenizers/       the tokenizer beside others
serving/          encoders as they are served on a CPU, beside what people serve with
embedding/        contrastive steps, memory of large batches and encoding on a GPU, beside sentence-transformers
recipes/          the runs of `examples/` beside transformers' Trainer
gpu/              `make gpu` and its like: all of it that needs a GPU, in parts with budgets; `make gpu-smoke`, every
                  kernel once, is one of them; what is owed to a GPU; tables of what is stored
gemm_tuning/      which tile of our matrix product, or the library, on a GPU
aot/              the ahead-of-time gate: what the kernels compile to, without a GPU
plot/             `make plots`: stored results as one page of pictures and tables
kit/              what they share: clocks, the command of a study, results as JSON lines, Markdown
results/          what was measured: of every case the newest; `make results` drops what newer lines replace
"""
