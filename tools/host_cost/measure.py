"""Runs steps under callgrind, and turns its dumps into instructions of a layer and of steps of 12 layers."""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tools.host_cost import build
from tools.host_cost.parsing import host_instructions, label_of

LAYER = "layer"  # the case that is counted for one layer
NUM_LAYERS = 12
Parts = dict[str, int]  # instructions by part of a step


def counted(precision: str, contestant: str, cases: Sequence[str]) -> dict[str, Parts]:
    """Returns the host's instructions by case and part."""
    build.all_libraries()
    arguments = [sys.executable, "-m", "tools.host_cost.count", precision, contestant, *cases]
    _run(arguments)  # compiles kernels, outside valgrind
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        _run(["setarch", "-R", *tool, *arguments])
        return from_dumps(Path(folder))


def _run(command: list[str]) -> None:
    fixed = dict(PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=os.environ | fixed, cwd=build.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def from_dumps(folder: Path) -> dict[str, Parts]:
    """Returns the host's instructions by case and part, of callgrind's dumps in a folder."""
    found: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("out.*")):
        if (label := label_of(path)) is not None:
            case, num_layers, part = label.split("|")
            found[case, part][int(num_layers)].append(host_instructions(path))
    cases: dict[str, Parts] = defaultdict(dict)
    for (case, part), by_layers in found.items():
        (few, of_few), (many, of_many) = sorted((layers, median(counts)) for layers, counts in by_layers.items())
        layer = (of_many - of_few) / (many - few)
        if case != LAYER:
            cases[case][part] = round(of_few + (NUM_LAYERS - few) * layer)
        elif part != "optimize":
            cases[case][part] = round(layer)
    return dict(cases)
