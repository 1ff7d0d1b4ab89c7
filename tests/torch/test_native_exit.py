"""The C++ routines where a program ends while its daemon threads are in them."""

import subprocess
import sys

import pytest

from bert_fast import native

PROGRAM = """
import array, importlib.util, threading, time

spec = importlib.util.spec_from_file_location("bert_fast._native", {file!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
tokens, inside = 1000, threading.Barrier(3)


def work():
    buffers = [array.array("f", bytes(4 * n)) for n in (tokens * 64, tokens * 64, tokens)]
    buffers.append(array.array("i", [0, tokens]))
    x, out, lse, cu = (buffer.buffer_info()[0] for buffer in buffers)
    inside.wait()
    while True:
        native.attention_fwd(
            q=x, k=x, v=x, q_stride=64, k_stride=64, v_stride=64, out=out, lse=lse, cu_q=cu, cu_k=cu, num_sequences=1,
            num_q_tokens=tokens, num_k_tokens=tokens, num_heads=1, head_dim=64, softmax_scale=1.0, coords_q=0,
            coords_k=0, seed=0, site=0, threshold=0, scale=1.0, causal=False, lse_stride=tokens, num_threads={threads},
        )


for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
inside.wait()
time.sleep(0.05)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_daemon_threads_at_exit(threads: int) -> None:
    """They do not come back, and the process ends as it should."""
    module = native.load()
    if module is None:
        pytest.skip(str(native.unavailable_reason()))
    program = PROGRAM.format(file=module.__file__, threads=threads)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
