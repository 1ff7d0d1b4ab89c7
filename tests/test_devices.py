"""What GPUs are taken for, and that Triton's kernels are refused where they cannot run: with made-up GPUs."""

import dataclasses
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_fast import backend, devices, env, explain
from bert_fast.backend import OpSpec
from bert_fast.cli import doctor
from bert_fast.errors import BackendError
from bert_fast.ops import layer_norm

pytest.importorskip("triton")

KB = 1024
GPU = torch.device("cuda", 0)
SPEC = OpSpec(GPU, torch.float16, hidden_size=64, head_dim=64)
OPS = ("attention", "layer_norm", "optimizer")


def forget() -> None:
    for one in (devices.chip, devices.launcher_problem, backend.resolve, backend._warn_of):
        one.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Makes torch see one GPU: (product, capability, KB of shared memory a program)."""

    def make(product: str, capability: tuple[int, int], shared: int) -> None:
        major, minor = capability
        properties = SimpleNamespace(
            name=product, major=major, minor=minor, multi_processor_count=40,
            shared_memory_per_block=48 * KB, shared_memory_per_block_optin=shared * KB,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: properties)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        forget()

    # Whatever this machine has: a compiler and headers.
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda name: str(tmp_path))
    yield make
    forget()


CARDS = {
    "A100": ((8, 0), 163), "RTX 3090": ((8, 6), 99), "L4": ((8, 9), 99), "H100": ((9, 0), 227), "B200": ((10, 0), 227),
    "RTX 5090": ((12, 0), 99),
}  # fmt: skip


@pytest.mark.parametrize("product", CARDS)
def test_triton_is_taken_on_chips_that_were_looked_at(product: str, gpu: Callable[..., None]) -> None:
    capability, shared = CARDS[product]
    gpu(product, capability, shared)
    assert devices.chip(0) == (f"sm_{capability[0]}{capability[1]}", product, capability, 40, shared * KB)
    for op in OPS:
        assert backend.implementation(op, SPEC).backend == "triton"


TOO_OLD = {
    "Tesla V100": ((7, 0), 96, "Tesla V100 (sm_70) is older than sm_80"),
    "Tesla T4": ((7, 5), 64, "Tesla T4 (sm_75) is older than sm_80"),
    "slice": ((8, 6), 48, "slice (sm_86) has 49152 bytes of shared memory a program, kernels take 101376"),
}


@pytest.mark.parametrize("product", TOO_OLD)
def test_chips_that_cannot_are_left_to_torch(product: str, gpu: Callable[..., None]) -> None:
    """Without a request once with a warning, on request not at all; said beforehand."""
    *facts, reason = TOO_OLD[product]
    gpu(product, *facts)
    x: Any = SimpleNamespace(device=GPU, dtype=torch.float16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for op in OPS:
            assert backend.resolve(op, SPEC).__name__ == f"bert_fast.torch.{op}"
            with pytest.raises(BackendError) as refused:
                backend.resolve(op, SPEC, "triton")
            assert str(refused.value).startswith(f"{op}: back-end 'triton' cannot run this call: {reason}")
            assert f"{op}: triton: {reason}" in explain(op, x) and f"{op}: torch: taken" in explain(op, x)
    assert [f"in the place of 'triton': {reason}" in str(one.message) for one in warned] == [True]
    report = doctor.collect()
    assert [advice for advice in report["advice"] if reason in advice and advice.startswith("GPU 0 does without")]
    assert f"GPU 0: {product}, sm_" in doctor.render(report)


LACKING = {
    "no compiler": (None, (), True, "neither gcc nor clang is there"),
    "no compiler of that name": ("xcc", ("gcc",), True, "CC=xcc is none that can be run"),
    "no headers": (None, ("clang",), False, "there is no Python.h"),
}


@pytest.mark.parametrize("what", LACKING)
def test_without_what_launchers_are_built_with(
    what: str, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named, there, has_headers, reason = LACKING[what]
    gpu("H100", *CARDS["H100"])
    looked_for: list[str] = []

    def which(name: str) -> str | None:
        looked_for.append(name)
        return f"/bin/{name}" if name in there else None

    monkeypatch.setattr(devices.shutil, "which", which)
    if not has_headers:
        (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(devices, "SETTINGS", dataclasses.replace(env.SETTINGS, c_compiler=named))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for op in OPS:
            assert backend.resolve(op, SPEC).__name__ == f"bert_fast.torch.{op}"
    assert [reason in str(one.message) for one in warned] == [True]
    with pytest.raises(BackendError, match=reason):
        backend.resolve("attention", SPEC, "triton")
    assert len(looked_for) == len(set(looked_for)), "asked once"
    assert [advice for advice in doctor.collect()["advice"] if reason in advice]


def test_a_builder_of_ones_own_needs_no_compiler(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    gpu("H100", *CARDS["H100"])
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    monkeypatch.setattr(triton.knobs.build, "impl", lambda *arguments: "")
    assert devices.launcher_problem() is None


def test_nothing_is_looked_for_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "chip", None)
    monkeypatch.setattr(devices, "launcher_problem", None)
    backend.resolve.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.resolve("layer_norm", OpSpec(torch.device("cpu"), torch.float64)).__name__.endswith("layer_norm")


def test_python_headers_are_looked_for_where_triton_does() -> None:
    include = Path(devices.sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        pytest.skip("this Python has no headers")
    devices.launcher_problem.cache_clear()
    assert "Python.h" not in (devices.launcher_problem() or "")


def test_every_chip_has_tiles() -> None:
    """Of its kind; one that nobody looked at is taken for a card, whose tiles fit everywhere."""
    from bert_fast.triton._attention_tiles import extras_config, launch_config, short_config
    from bert_fast.triton._gemm_tiles import candidates
    from bert_fast.triton._launch import kind_of

    kinds = {
        "sm_80": "sm_80", "sm_86": "sm_86", "sm_87": "sm_80", "sm_89": "sm_86", "sm_90": "sm_90", "sm_100": "sm_100",
        "sm_103": "sm_100", "sm_110": "sm_86", "sm_120": "sm_86", "sm_121": "sm_86", "gfx942": "gfx", "gfx1100": "gfx",
    }  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds
    for name in kinds:
        assert len(candidates(name, torch.bfloat16)) == 4 and len(candidates(name, torch.float32)) == 1
        for head_dim in (16, 64, 128):
            for dtype in (torch.float32, torch.bfloat16):
                assert all(launch_config(head_dim, dtype, name, True, drops) for drops in (False, True))
                assert extras_config(head_dim, dtype, name, False)
                assert extras_config(head_dim, dtype, name, True).gradients
        assert short_config(100, 64, torch.bfloat16, name, False)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_the_assembler_is_the_one_that_triton_calls(capability: tuple[int, int]) -> None:
    devices.assembler.cache_clear()
    said = devices.assembler(capability)
    assert said is not None
    version, path = said.removeprefix("ptxas ").split(" at ")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"release {version}" in told


def test_an_assembler_of_the_users_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the environment variable, by its own word; one that cannot be run is not there."""
    own = tmp_path / "ptxas"
    own.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.7, V99.7.1'\n")
    own.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(own))
    devices.assembler.cache_clear()
    assert devices.assembler((8, 0)) == f"ptxas 99.7 at {own}"
    monkeypatch.setattr(devices.sys, "executable", str(tmp_path / "no python"))
    devices.assembler.cache_clear()
    assert devices.assembler((8, 0)) is None
    devices.assembler.cache_clear()


@pytest.mark.parametrize("answer", [None, "ptxas 13.4 at /opt/ptxas"], ids=["unknown", "known"])
def test_doctor_names_the_assembler(answer: str | None, gpu: Callable[..., None], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    gpu("H100", *CARDS["H100"])
    monkeypatch.setattr(devices, "assembler", {(9, 0): answer}.get)
    report = doctor.collect()
    assert report["devices"]["gpu_assemblers"] == [answer]
    (line,) = [line for line in doctor.render(report).splitlines() if line.startswith("  GPU 0: ")]
    assert line.endswith(f"; kernels by {answer}" if answer else "KB of shared memory")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_too_little_memory_is_named(direction: str, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the op and the device, as the error that it was; the next call runs."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def call() -> None:
        layer_norm(x, weight, weight, backend="torch").sum().backward()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(f"bert_fast.torch.layer_norm.layer_norm_{direction}", fail)
        with pytest.raises(torch.OutOfMemoryError, match=rf"^layer_norm_{direction} on cpu: tried to allocate 80 GiB$"):
            call()
    call()
    gpu("RTX 3090", *CARDS["RTX 3090"])
    assert devices.name_of(GPU) == "RTX 3090 (sm_86)" and devices.name_of(torch.device("cpu")) == "cpu"
