"""The command of a study: a comparison with other libraries, taken now and then, whose stored figures a page shows.

A study says what it measures, where the lines go and which tables a page has of them; the rest is the same for all.
Importing this module imports no torch.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.markdown import show_tables
from benchmarks.kit.results import DATA, NO_DATA, ROOT, Recorder, cpu_environment

Line = dict[str, Any]
Job = Callable[[], Iterable[Line]]


def one_line(line: Line) -> str:
    """The figures of a result for the terminal: its own, then those of each entrant; or why there are none."""
    named = " ".join(line[name] for name in ("case", "mode", "provider") if name in line)
    entrants = (f"{name} {_figures(figures)}" for name, figures in line.get("entrants", {}).items())
    parts = [line.get("reason"), _figures(line), *entrants]
    return f"{named}: {'; '.join(filter(None, parts))}"


def _figures(line: Line) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in line.items() if isinstance(value, (int, float)))


@dataclass(frozen=True)
class Study:
    """A study and its command, `python -m benchmarks.<name>`.

    help: what the command says of itself. file: where results go. jobs: from the options of the command line, name ->
    what yields its lines, each with a `kind`. tables: Markdown by name, from what a file holds. page: shows the tables
    between marks; None where `benchmarks.table` writes them. rounds, what_rounds: the default of `--rounds`, and what
    they are. add_options: adds the study's own options. environment: what stands in every line. shown: a line for the
    terminal.
    """

    name: str
    help: str
    file: Path
    jobs: Callable[[argparse.Namespace], dict[str, Job]]
    tables: Callable[[Path], dict[str, str]] | None = None
    page: Path | None = None
    rounds: int | None = None
    what_rounds: str = "counted rounds"
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    environment: Callable[[], Line] = cpu_environment
    shown: Callable[[Line], str] = one_line

    def main(self, arguments: list[str] | None = None) -> int:
        """Command line; 1 if a job failed, which stops no other."""
        options = self._parser().parse_args(arguments)
        if self.tables is not None and options.tables:
            show_tables(self.tables(self.file), self.page or Path(), self.page is not None and options.write)
            return 0
        try:
            jobs = {name: job for name, job in self.jobs(options).items() if options.only in name}
        except FileNotFoundError as error:
            print(f"python -m benchmarks.{self.name}: {error}", file=sys.stderr)
            return 1
        if options.list:
            print("\n".join(jobs))
            return 0
        recorder = Recorder(self.file, self.environment())
        failed = 0
        for name, job in jobs.items():
            begun = time.perf_counter()
            try:
                for line in job():
                    print(f"{self.shown(line)}  [{time.perf_counter() - begun:.0f} s]", flush=True)
                    if not options.dry_run:
                        recorder.write(**line)
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                failed += 1
                said = str(error) if DATA.is_dir() else f"{str(error).splitlines()[-1]} ({NO_DATA})"
                print(f"{name}: FAILED: {said}", flush=True)
        return 1 if failed else 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=self.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--only", default="", metavar="TEXT", help="run jobs whose name contains this text")
        parser.add_argument("--list", action="store_true", help="print the names of the jobs and stop")
        parser.add_argument("--dry-run", action="store_true", help="do not store the results")
        default = "" if self.rounds is None else "; default: %(default)s"
        parser.add_argument("--rounds", type=int, default=self.rounds, help=self.what_rounds + default)
        if self.tables is not None:
            parser.add_argument("--tables", action="store_true", help="print the tables of stored results and stop")
        if self.page is not None:
            page = self.page.relative_to(ROOT)
            parser.add_argument("--write", action="store_true", help=f"with --tables: put them into {page}")
        self.add_options(parser)
        return parser


def in_a_process(module: str, *arguments: str, threads: int | None = None) -> Line:
    """What a module of `benchmarks` prints last, a line of JSON, when it runs in a process of its own.

    threads: to which the process keeps its thread pools. RuntimeError with what it said if it fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    environment = os.environ | ({} if threads is None else _thread_environment(threads))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[2:])}: ended with status {done.returncode}: {done.stderr[-1500:]}")
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def _thread_environment(count: int) -> dict[str, str]:
    names = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(count)) | {"TOKENIZERS_PARALLELISM": "true" if count > 1 else "false"}
