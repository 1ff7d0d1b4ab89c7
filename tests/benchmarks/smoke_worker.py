"""Stands for a process of the smoke run, up at once; what happens is in the name of the family.

"dies-hangs" has a case "fine", then one that dies, one that hangs, "last".
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu.run import Run
from benchmarks.kit.crashes import Progress, leave

PATIENCE = 600.0


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    family, progress = arguments["--family"], Progress(Path(arguments["--progress"]))
    recorder = Run.read(Path(arguments["--run"])).recorder
    if family == "unimportable":
        sys.exit("no module named so")
    if family == "silent":
        time.sleep(PATIENCE)
    cases = [f"{family}/{name}" for name in ("fine", *family.split("-"), "last")]
    cases = [name for name in cases if name in json.loads(arguments.get("--only", json.dumps(cases)))]
    progress.plan(cases)
    for case in cases:
        if case in progress.begun():
            continue
        progress.begin(case)
        name, blocking = case.split("/")[1], os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        outcome, error = "green", None
        if blocking:
            outcome, error = "red", "an illegal access in _a_kernel"
        elif name == "dies":
            with open(arguments["--progress"], "a") as file:
                file.write('\n["end", "dies/di')
            print("the reason", file=sys.stderr, flush=True)
            os.abort()
        elif name == "hangs":
            time.sleep(PATIENCE)
        elif name == "breaks":  # the device is gone, the process is not
            outcome, error = "crash", "an illegal memory access was encountered"
        recorder.write("smoke", family=family, case=case, outcome=outcome, error=error, blocking=blocking,
                       kernels={"_a_kernel": "12"})  # fmt: skip
        if outcome == "crash":
            leave()
        progress.end(case)


if __name__ == "__main__":
    main()
