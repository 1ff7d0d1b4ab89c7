"""What processes of a run send one another, and what each keeps: counted, for the table of docs/scaling.md.

    python -m benchmarks.scaling [--processes 2 4] [--dry-run]

Steps of BERT with N processes over gloo on this machine, in a network of their own (`unshare --net`), whose loopback
counts every byte: those of a step are a difference of its counters over several. Bytes kept are those of the tensors
that a process holds after a step: parameters, gradients, averages. FSDP2 has whole parameters besides, while they are
at work: their bytes are counted in every layer, forward and backward, and the most is told.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.record import RESULTS, ROOT, Recorder, host_environment
from benchmarks.pretraining.memory import Words
from bert_fast import BertConfig, BertForMaskedLM
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Trainer, TrainingConfig
from bert_fast.training.observers import Observer, Step

_STEPS, _FIRST = 8, 3  # steps made, and the one from whose end bytes are counted
_SIZES = dict(
    vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
    max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_COUNTERS = Path("/proc/self/net/dev")  # of the network that this process is in


def sent_by_formula(parameters: int, in_layers: int, processes: int, sharding: str, accumulation: int) -> float:
    """Bytes that a process sends in a step, by the table of docs/scaling.md; gloo scatters after it reduced all."""
    if sharding == "none":
        return 2 * (processes - 1) / processes * 4 * parameters
    elsewhere = parameters - in_layers
    gathered = (2 * accumulation + 1) * in_layers + (accumulation + 1) * elsewhere
    gloo = parameters  # its reduce-scatter is an all-reduce of which all but a part is dropped
    return (processes - 1) / processes * 4 * (gathered + gloo)


def measure(processes: int, sharding: str, accumulation: int) -> dict[str, Any]:
    """One line: bytes sent by a process in a step, counted and by formula; bytes kept, counted.

    Raises:
        SystemExit: a network of its own is not allowed here, or a process failed; with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        worker = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "29511",
            "-m", "benchmarks.scaling", "--worker", folder, "--sharding", sharding, "--accumulation", str(accumulation),
        ]  # fmt: skip
        shell = f"ip link set lo up && exec {' '.join(worker)}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", shell], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        line = json.loads(found.read_text(encoding="utf-8"))
    formula = sent_by_formula(line["parameters"], line["in_layers"], processes, sharding, accumulation)
    line["sent"] = round(line.pop("sent_together") / processes)
    return line | {"sent_by_formula": round(formula), "ratio": round(line["sent"] / formula, 3)}


class _Texts:
    """Examples that are all alike, of 32 tokens."""

    def lengths(self, epoch: int) -> np.ndarray:
        return np.full(512, 32, dtype=np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        ids = torch.arange(32 * len(indices)) % 4000
        places = torch.arange(0, len(ids), 8)
        return PackedBatch(
            input_ids=ids,
            cu_seqlens=torch.arange(0, len(ids) + 1, 32, dtype=torch.int32),
            max_seqlen=32,
            masked_lm_positions=places,
            labels=ids[places],
        )


class _Sent(Observer):
    """The counter of bytes sent, after every step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def step(self, step: Step) -> None:
        (line,) = (
            line for line in _COUNTERS.read_text(encoding="ascii").splitlines() if line.strip().startswith("lo:")
        )
        self.found.append(int(line.split(":")[1].split()[8]))  # bytes sent


def _work(folder: Path, sharding: str, accumulation: int) -> None:
    """In each process: a run, watched."""
    model = BertForMaskedLM(BertConfig(**_SIZES))
    parameters = sum(p.numel() for p in model.parameters())
    in_layers = sum(p.numel() for p in model.bert.encoder.layer.parameters())
    config = TrainingConfig(
        folder / "run", steps=_STEPS, batch_size=2, gradient_accumulation=accumulation, sharding=sharding, log_every=1,
        keep_checkpoints=0,
    )  # fmt: skip
    sent = _Sent()
    trainer = Trainer(model, Words(_Texts()), config, observers=[sent])
    whole = _watch_whole(trainer.model) if sharding == "fsdp2" else {}
    gradients = [0]
    trainer.optimizer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(_local(p.grad) for p in trainer.model.parameters() if p.grad is not None))
    )
    trainer.train()
    if not trainer.is_main:
        return
    states = trainer.optimizer.optimizer.state.values()
    line = {
        "processes": trainer.processes.count,
        "sharding": sharding,
        "accumulation": accumulation,
        "parameters": parameters,
        "in_layers": in_layers,
        "sent_together": (sent.found[-1] - sent.found[_FIRST - 1]) / (_STEPS - _FIRST),
        "kept_parameters": sum(_local(p) for p in trainer.model.parameters()),
        "kept_gradients": max(gradients),
        "kept_averages": sum(_local(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")),
        **whole,
    }
    (folder / "found.json").write_text(json.dumps(line), encoding="utf-8")


def _local(tensor: Any) -> int:
    """Bytes of a tensor in this process."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.numel() * own.element_size()


def _watch_whole(model: Any) -> dict[str, int]:
    """The most bytes of gathered parameters, and of gradients not yet shared out, in any part of a layer's work."""
    most = {"whole_at_once": 0, "whole_gradients": 0}
    groups = [part._get_fsdp_state()._fsdp_param_group for part in (model, *model.base_model.encoder.layer)]

    def note(*_: Any) -> None:
        parts = [one for group in groups for one in group.fsdp_params]
        whole = sum(output.untyped_storage().size() for one in parts for output in one.all_gather_outputs)
        kept = [getattr(getattr(one, "_unsharded_param", None), "grad", None) for one in parts]
        gradients = sum(one.numel() * one.element_size() for one in kept if one is not None)
        most["whole_at_once"] = max(most["whole_at_once"], whole)
        most["whole_gradients"] = max(most["whole_gradients"], gradients)

    for layer in model.base_model.encoder.layer:
        layer.register_forward_hook(note)
        layer.register_full_backward_hook(note)
        for module in layer.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(note)
    return most


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    for hidden in ("--worker", "--sharding", "--accumulation"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _work(Path(options.worker), options.sharding, int(options.accumulation))
        return 0
    recorder = Recorder(RESULTS / "scaling.jsonl", host_environment())
    for processes in options.processes:
        for sharding, accumulation in (("none", 1), ("none", 4), ("fsdp2", 1), ("fsdp2", 4)):
            line = measure(processes, sharding, accumulation)
            print(line, flush=True)
            if not options.dry_run:
                recorder.write("scaling", **line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
