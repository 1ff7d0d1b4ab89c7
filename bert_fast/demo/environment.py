"""What the numbers were measured on."""

import datetime
from dataclasses import dataclass

import torch

from bert_fast import backend, native
from bert_fast.training.reporting.run_directory import device_name, versions

__all__ = ["Environment", "describe_environment"]


@dataclass(frozen=True)
class Environment:
    """Machine, versions, and which implementations ran."""

    time: str
    device: str
    threads: int
    versions: dict[str, str]
    native: str
    backends: dict[str, str]  # op -> back-end

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) for people."""
        names = sorted(set(self.backends.values()))
        by_backend = {name: [op for op, used in self.backends.items() if used == name] for name in names}
        return [
            ("Time", self.time),
            ("Device", f"{self.device}, {self.threads} PyTorch thread{'s' if self.threads != 1 else ''}"),
            ("Versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
            ("C++ extension", self.native),
            ("Back-ends", "; ".join(f"{name}: {', '.join(ops)}" for name, ops in by_backend.items())),
        ]


def describe_environment(device: torch.device) -> Environment:
    """Of this process and the device that the models are put on."""
    spec = backend.OpSpec(device, torch.float32)
    extension = native.load()
    return Environment(
        time=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(("torch", "transformers", "tokenizers", "triton", "numpy")),
        native=f"not used ({native.unavailable_reason()})" if extension is None else f"used ({_simd(extension)})",
        backends={op: backend.implementation(op, spec, backend.requested()).backend for op in backend.op_names()},
    )


def _simd(extension: object) -> str:
    level = getattr(extension, "simd_level", None)
    return f"SIMD level {level()}" if callable(level) else "no SIMD dispatch"
