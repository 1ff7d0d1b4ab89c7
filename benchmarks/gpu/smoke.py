"""Part `smoke`: every kernel once, a process for each family, side by side; the first thing to run on a GPU.

A process tells of each case as soon as it is through. Behind one that crashes or hangs in a case another goes on, and
the case is run again alone, with CUDA_LAUNCH_BLOCKING=1, so that its error names the launch. What did not come back
from a process, and what the time did not suffice for, gets its lines here.

Importing this module imports no torch.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.driver import Ended, Process
from benchmarks.kit.crashes import Progress
from benchmarks.kit.results import Recorder, read_lines

WHOLE = "whole"  # the family of what is no op: a model, a graph, a product of the library
GREEN = ("green", "skipped")  # outcomes of a case
# The longest first: with fewer processors than families they wait for one another.
LONGEST = ("attention", WHOLE, "linear_cross_entropy", "mlp", "linear_gelu", "encoder_layer")
SHARES = {"attention": 3}  # processes of a family, where there are more than one: many kernels that compile for long


@dataclass(frozen=True)
class Smoke:
    """Cases of a family for one process.

    command: of a process, without its options. progress: where it notes its cases. case_s, start_s: the longest that a
    case, and what comes before the first, may take. share: "1/3" for every third case, from the second on. only: names
    of the cases, None for all. is_alone: whether it is one case, run again after a crash.
    """

    command: tuple[str, ...]
    recorder: Recorder
    progress: Path
    case_s: float
    start_s: float
    family: str = ""
    share: str = "0/1"
    only: tuple[str, ...] | None = None
    is_alone: bool = False

    def processes(self, families: Mapping[str, list[str] | None]) -> tuple[Process, ...]:
        """One for each family, or several. families: name -> the cases to run, None for all of them."""
        rank = {name: place for place, name in enumerate(LONGEST)}
        found = []
        for family in sorted(families, key=lambda name: (rank.get(name, len(rank)), name)):
            only = families[family]
            count = SHARES.get(family, 1) if only is None else 1
            for index in range(count):
                progress = self.progress.with_name(f"{self.progress.name}-{family}-{index}")
                one = replace(self, progress=progress, family=family, share=f"{index}/{count}")
                found.append(replace(one, only=only and tuple(only))._process())
        return tuple(found)

    @property
    def _name(self) -> str:
        """Of all its cases together."""
        return self.family if self.share == "0/1" else f"{self.family} {self.share}"

    def _process(self) -> Process:
        command = (*self.command, "--family", self.family, "--share", self.share, "--progress", str(self.progress))
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}  # of many processes at once
        return Process(
            f"smoke {self._name}{' again' if self.is_alone else ''}",
            command if self.only is None else (*command, "--only", json.dumps(self.only)),
            environment | ({"CUDA_LAUNCH_BLOCKING": "1"} if self.is_alone else {}),
            self.progress, self.case_s, self.start_s, None if self.is_alone else self._again, self._ended,
        )  # fmt: skip

    def _again(self, case: str) -> Process:
        progress = self.progress.with_name(f"{self.progress.name}-{len(Progress(self.progress).begun())}")
        return replace(self, progress=progress, share="0/1", only=(case,), is_alone=True)._process()

    def _ended(self, ended: Ended) -> str:
        """Stores what did not come back."""
        planned, stored = Progress(self.progress).planned(), self.recorder.of_this_run("smoke")
        told = {line["case"] for line in stored if line["blocking"] is self.is_alone}
        if ended.outcome in ("crashed", "hung", "failed"):
            lost = self._name if planned is None else ended.case
            if lost is not None and lost not in told:  # a process whose device is gone has told of the case itself
                self._store(lost, "hang" if ended.outcome == "hung" else "crash", ended.why)
                told.add(lost)
        if not ended.goes_on and not self.is_alone:
            for case in [self._name] if planned is None else planned:
                if case not in told:
                    self._store(case, "not run", None)
        return ended.outcome

    def _store(self, case: str, outcome: str, error: str | None) -> None:
        which = {"share": self.share} if case == self._name else {}  # its cases are not known
        fields = {"family": self.family, "case": case, "outcome": outcome, "error": error, "blocking": self.is_alone}
        self.recorder.write("smoke", **fields, **which)


def red_cases(path: Path) -> dict[str, list[str] | None]:
    """Family -> its cases that were not green when they were last run, by a file; None where a process named none."""
    lines = [line for line in read_lines(path) if line.get("kind") == "smoke" and not line["blocking"]]
    found: dict[str, list[str] | None] = {}
    for case, line in {line["case"]: line for line in lines}.items():
        if line["outcome"] in GREEN:
            continue
        cases = found.get(line["family"], [])
        if "share" not in line:
            found[line["family"]] = None if cases is None else [*cases, case]
        elif line["run"] == lines[-1]["run"]:  # of an older run: its cases have been named since
            found[line["family"]] = None
    return found
