"""Measures tokenizers: bert_fast's beside all others that are installed; or shows what is stored.

    python -m benchmarks.tokenizers                     everything, about six minutes
    python -m benchmarks.tokenizers --only zh_docs      jobs whose name contains a text
    python -m benchmarks.tokenizers --list
    python -m benchmarks.tokenizers --goals             the stored figures beside what they are meant to reach
    python -m benchmarks.tokenizers --tables [--write]  the tables of docs/tokenizer_speed.md; --write puts them there

Results go to `benchmarks/results/tokenizers.jsonl`.
"""

import argparse
import sys
import time

from benchmarks.kit.markdown import show_tables
from benchmarks.kit.record import RESULTS, Recorder
from benchmarks.tokenizers.environment import tokenizer_environment
from benchmarks.tokenizers.jobs import LIVES, ROUNDS, tokenizer_jobs
from benchmarks.tokenizers.report import PAGE, goals_table, shown, tables
from benchmarks.tokenizers.stored import newest_lines


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a job failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="run jobs whose name contains this text")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds of a process; default: %(default)s")
    parser.add_argument("--lives", type=int, default=LIVES, help="processes of a case; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--goals", action="store_true", help="print the table of goals from stored results and stop")
    parser.add_argument("--tables", action="store_true", help="print all tables from stored results and stop")
    parser.add_argument("--write", action="store_true", help="with --tables: put them into docs/tokenizer_speed.md")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    options = parser.parse_args(arguments)
    if options.goals or options.tables:
        lines = newest_lines(RESULTS / "tokenizers.jsonl")
        if options.goals:
            print(goals_table(lines))
        else:
            show_tables(tables(lines), PAGE, options.write)
        return 0
    jobs = {name: job for name, job in tokenizer_jobs(options.rounds, options.lives).items() if options.only in name}
    if options.list:
        print("\n".join(jobs))
        return 0
    recorder = Recorder(RESULTS / "tokenizers.jsonl", tokenizer_environment())
    failed = 0
    for name, job in jobs.items():
        start = time.perf_counter()
        try:
            for line in job():
                print(f"{shown(line)}  [{time.perf_counter() - start:.0f} s]", flush=True)
                if not options.dry_run:
                    recorder.write(**line)
        except (OSError, RuntimeError, ValueError) as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
