"""`bert-fast doctor` on this machine, and on machines with gaps (made by hiding what is here)."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_fast import backend, env, native
from bert_fast._version import __version__
from bert_fast.cli import doctor, main

ROOT = Path(__file__).resolve().parents[2]


def advice_about(report: dict[str, Any], word: str) -> list[str]:
    return [advice for advice in report["advice"] if word in advice]


def test_text_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--verbose"]) == 0
    out = capsys.readouterr().out
    for expected in (
        __version__,
        metadata.version("torch"),
        "NVIDIA apex",
        "C++ extension",
        "Back-ends on cpu",
        "What to do",
    ):
        assert expected in out
    for name in (*env.VARIABLES, *backend.op_names(), *backend.BACKENDS, *(p.distribution for p in doctor.PACKAGES)):
        assert name in out


def test_text_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where much is missing; whole packages are named, and each reason once."""
    monkeypatch.setattr(doctor, "_is_there", lambda module: module in {"torch", "numpy", "safetensors", "pyarrow"})
    assert main.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 45
    assert "transformers (not installed)" in out and "torch runs" in out
    assert out.count("cannot run") == 1 and "triton cannot run" in out
    assert "What to do" in out and "--verbose" in out.splitlines()[-1]
    for name in (p.distribution for p in doctor.PACKAGES):
        assert name in out


def test_json_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(doctor.collect()))
    assert report["ok"] is True
    assert {entry["op"] for entry in report["backends"]} == set(backend.op_names())


def test_backends_agree_with_the_choice_that_ops_make() -> None:
    report = doctor.collect()
    for entry in report["backends"]:
        spec = backend.OpSpec(torch.device(entry["device"]), torch.float32)
        assert entry["taken"] == backend.implementation(entry["op"], spec).backend
        # The last resort of every op has nothing against it.
        assert entry["candidates"][-1] == {"backend": "reference", "reasons": []}


@pytest.mark.skipif(env.SETTINGS.triton_interpret, reason="the interpreter runs Triton kernels on the CPU")
def test_says_why_triton_cannot_run_on_the_cpu() -> None:
    entry = next(
        e for e in doctor.collect()["backends"] if e["op"] == "dropout_add_layer_norm" and e["device"] == "cpu"
    )
    reasons = {candidate["backend"]: candidate["reasons"] for candidate in entry["candidates"]}
    assert any("TRITON_INTERPRET" in reason for reason in reasons["triton"])
    assert "cannot run: " in doctor.render(doctor.collect(), verbose=True)


def test_minimum_versions_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for package in doctor.PACKAGES:
        if package.minimum:
            assert any(line.startswith(f"{package.distribution}>={package.minimum}") for line in listed), package
        assert package.required == any(line.startswith(f"{package.distribution}>=") for line in project["dependencies"])


def test_missing_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_there", lambda module: module != "tokenizers")
    report = doctor.collect()
    assert report["ok"] is True
    assert len(advice_about(report, "tokenizers is not installed")) == 1
    assert "pip install 'bert_fast[demo]'" in advice_about(report, "tokenizers is not installed")[0]


def test_missing_peers_are_no_reason_for_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_there", lambda module: module not in {"flash_attn", "xformers", "liger_kernel"})
    report = doctor.collect()
    assert not any(advice_about(report, name) for name in ("flash-attn", "xformers", "liger-kernel"))


def test_too_old_required_package_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"torch": "2.9.1+cu128"}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or real(name))
    assert main.main(["doctor"]) == 1
    assert "torch is older than 2.10 (needed for everything): pip install 'torch>=2.10'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9.1", "2.10"), ("2.10.0", "2.10.1"), ("3.6.0", "3.10.0"), ("2.11.0+cu130", "2.12.0a0")]
)
def test_versions_compare_as_numbers(older: str, newer: str) -> None:
    assert doctor._numbers(older) < doctor._numbers(newer)


def make_package(folder: Path, *parts: str) -> None:
    for part in parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")


def test_nvidia_apex_is_told_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "apex", "apex/optimizers", "apex/normalization")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = doctor.collect()
    assert report["apex"] == {"kind": "nvidia", "location": str(tmp_path / "apex"), "extensions": []}
    assert advice_about(report, "without its CUDA extensions")
    (tmp_path / "amp_C.py").write_text("raise RuntimeError('must not be imported')\n")
    report = doctor.collect()
    assert report["apex"]["extensions"] == ["amp_C"]
    assert not advice_about(report, "apex")


@pytest.mark.parametrize("parts", [["apex"], ["apex", "apex/optimizers"]])
def test_unrelated_apex_is_told(parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, *parts)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = doctor.collect()
    assert report["apex"]["kind"] == "unrelated"
    assert advice_about(report, "not NVIDIA's")
    assert "another package of that name" in doctor.render(report)


@pytest.mark.parametrize("features", ["avx512", ["avx2", "fma"], {"avx2": True, "avx512f": False}])
def test_extension_reports_its_instruction_sets(features: object, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = SimpleNamespace(
        __version__=__version__, __file__="_native.so", cpu_features=lambda: features, simd_levels=lambda: ["avx2"]
    )
    monkeypatch.setattr(native, "load", lambda: extension)
    report = doctor.collect()
    assert report["native"]["cpu_features"] == features
    shown = next(line for line in doctor.render(report).splitlines() if "CPU features" in line)
    assert "avx" in shown
    assert "avx512f" not in shown
    assert not advice_about(report, "C++ extension")


def test_windows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not advice_about(doctor.collect(), "Windows")
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert len(advice_about(doctor.collect(), "use WSL 2")) == 1


def test_stale_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(__version__="0.0.1", __file__="_native.so"))
    assert advice_about(doctor.collect(), "of version 0.0.1")


def test_triton_3_6_with_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.4.6"}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or real(name))
    assert advice_about(doctor.collect(), "numpy<2.4")
    versions["numpy"] = "2.3.5"
    assert not advice_about(doctor.collect(), "numpy<2.4")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("cuda", "is no back-end"), ("triton", "cannot run on cpu: attention"), ("reference", None), ("", None)],
)
def test_forced_backend(value: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_FAST_BACKEND", value)
    advice = advice_about(doctor.collect(), "BERT_FAST_BACKEND")
    assert [expected in line for line in advice] == ([True] if expected else [])


def test_switched_off_extension_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "bert_fast.cli.main", "doctor", "--json"]
    environment = {**os.environ, "BERT_FAST_NATIVE": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert report["native"]["loaded"] is False
    assert advice_about(report, "BERT_FAST_NATIVE=0")
