"""Another ptxas than Triton's own, for all that a command starts: is a wrong result the kernel's, or its assembler's?

Triton's caches know the version, so kernels of both stay beside one another. Importing this module imports no torch.
"""

import os
import re
import subprocess
from pathlib import Path

# What Triton reads: the second for sm_100 and later and, from 3.9 on, for sm_90.
VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
_ANSWER_S = 60


def use_assembler(path: Path) -> str:
    """Has Triton make kernels by this ptxas in every process started from here; "13.3 at <path>".

    Raises: SystemExit if it is none that runs: Triton would pass over it and take its own.
    """
    path = path.resolve()
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"--ptxas: expected a ptxas that runs, got {path} ({type(error).__name__})") from None
    version = re.search(r"release (\d+\.\d+)", done.stdout)
    if version is None:
        raise SystemExit(f"--ptxas: expected a ptxas, which says its release, got {path}")
    os.environ.update(dict.fromkeys(VARIABLES, str(path)))
    return f"{version[1]} at {path}"
