"""What a run of `make gpu` tells the processes of its parts, in a file.

Importing this module imports no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.record import Recorder


@dataclass(frozen=True)
class Run:
    """One run of `make gpu`: where results go, what stands in every line, and on what device which cases run.

    device: "cuda", or "cpu" for tests; size: of the cases, as `registry.kernel_cases` has it.
    compile_backend: of torch.compile; rounds: counted rounds of every contestant, None for the usual number.
    """

    results: str
    shared: dict[str, Any]
    device: str = "cuda"
    size: str = "gpu"
    compile_backend: str = "inductor"
    rounds: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Run":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.__dict__))

    @property
    def recorder(self) -> Recorder:
        return Recorder(Path(self.results), self.shared)
