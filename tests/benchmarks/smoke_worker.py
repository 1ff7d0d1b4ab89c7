"""Stands for a process of the smoke run, up at once: `python tests/benchmarks/smoke_worker.py --family WHAT`.

What happens is in the name of the family: "dies-hangs" has a case "fine", then one that dies, one that hangs, "last".
"""

import json
import os
import sys
import time
from typing import Any

PATIENCE = 600.0


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    family = arguments["--family"]

    def tell(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    if family == "environment":
        return tell(environment={"run": "1", "gpu": "Made up (test)", "dirty": False, "commit": arguments["--commit"]})
    if family == "unimportable":
        sys.exit("no module named so")
    if family == "silent":
        time.sleep(PATIENCE)
    cases = [f"{family}/{name}" for name in ("fine", *family.split("-"), "last")]
    cases = [name for name in cases if name in json.loads(arguments.get("--only", json.dumps(cases)))]
    tell(cases=cases)
    for case in cases:
        tell(begin=case)
        name, blocking = case.split("/")[1], os.environ.get("CUDA_LAUNCH_BLOCKING")
        said = {"case": case, "outputs": [], "compiled": [], "kernels": {"_a_kernel": "12"}}
        if blocking:
            tell(**said, outcome="red", error="an illegal access in _a_kernel")
        elif name == "dies":
            sys.stdout.write('{"case"')
            sys.stdout.flush()
            print("the reason", file=sys.stderr, flush=True)
            os.abort()
        elif name == "hangs":
            time.sleep(PATIENCE)
        elif name == "breaks":  # the device is gone, the process is not
            tell(**said, outcome="crash", error="an illegal memory access was encountered")
            os._exit(3)
        else:
            tell(**said, outcome="green", error=None)
    return None


if __name__ == "__main__":
    main()
