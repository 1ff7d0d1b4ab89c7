"""Measures tokenizers: bert_fast's beside all others that are installed; or shows what is stored.

    python -m benchmarks.tokenizers                     everything, about six minutes
    python -m benchmarks.tokenizers --only zh_docs      jobs whose name contains a text
    python -m benchmarks.tokenizers --tables [--write]  the tables of docs/tokenizer_speed.md; --write puts them there

docs/tokenizer_speed.md says how figures are taken.
"""

import sys
from argparse import ArgumentParser

from benchmarks.kit.results import RESULTS
from benchmarks.kit.study import Study
from benchmarks.tokenizers.jobs import LIVES, ROUNDS, tokenizer_environment, tokenizer_jobs
from benchmarks.tokenizers.report import PAGE, shown, tables
from benchmarks.tokenizers.stored import newest_lines


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--lives", type=int, default=LIVES, help="processes of a case; default: %(default)s")


STUDY = Study(
    "tokenizers",
    __doc__,
    RESULTS / "tokenizers.jsonl",
    jobs=lambda options: tokenizer_jobs(options.rounds, options.lives),
    tables=lambda file: tables(newest_lines(file)),
    page=PAGE,
    rounds=ROUNDS,
    what_rounds="counted rounds of a process",
    add_options=_add_options,
    environment=tokenizer_environment,
    shown=shown,
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
