"""Whether the sanitizers watch: that the module is theirs, and that a process that reads outside of a tensor ends.

python tools/sanitized/python.py tools/sanitized/probe.py
"""

import subprocess
import sys

READ_OUTSIDE = """
import torch
from bert_fast import _native
x, y = torch.zeros(4), torch.zeros(5)
_native.dropout(dst=y.data_ptr(), src=x.data_ptr(), num_rows=1, num_cols=5, src_row_stride=5, coords=0, seed=0, site=0,
                threshold=0, scale=1.0, num_threads=1)
"""
EXPECTED = "AddressSanitizer: heap-buffer-overflow"
OVER_NULL_DRIVER = """
from tools.null_driver import build, driver
if build.missing() is None:
    driver.start()
from bert_fast import _native
print(_native.__file__)
"""


def main() -> int:
    from bert_fast import _native

    done = subprocess.run([sys.executable, "-c", READ_OUTSIDE], capture_output=True, text=True, check=False)
    if done.returncode == 0 or EXPECTED not in done.stderr:
        print(f"{_native.__file__}: a read outside of a tensor went unnoticed, exit {done.returncode}\n{done.stderr}")
        return 1
    command = [sys.executable, "-c", OVER_NULL_DRIVER]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if found != _native.__file__:
        print(f"over the null driver: expected {_native.__file__}, got {found}")
        return 1
    print(f"{_native.__file__}: {EXPECTED} is reported where it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
