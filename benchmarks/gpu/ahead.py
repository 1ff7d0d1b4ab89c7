"""Compiles for a GPU on a machine without one, into the cache that `make gpu-smoke` and `make gpu` read.

    python -m benchmarks.gpu.ahead [--device sm_90] [--families NAMES] [--jobs N]

Over the null driver everything is compiled and launched and nothing runs. Triton finds what it compiles by its own
files, its version and ptxas, and the cache holds absolute paths: so this wants the Triton, and the Python, of the
GPU's machine, and there the project at the same path. Only what is loaded stays in the cache, a seventh of it.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.families import family_names
from benchmarks.gpu.run import CACHE_VARIABLES, chosen
from benchmarks.kit.record import reason
from tools.null_driver.driver import DEVICES

KEPT = (".cubin", ".hsaco", ".json")  # machine code, and what Triton knows of it

Job = tuple[str, Any]  # what is compiled, and of what: a family, or a place in a list


def _start(device: str) -> None:
    """In each process, before bert_fast is imported."""
    from benchmarks.smoke.dry import start

    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what torch warns of on a CPU is nothing of a GPU's
    start(device)


def jobs(families: list[str]) -> Iterator[Job]:
    """What takes longest first; of all families also whole models, attention's tiles and matrix products."""
    from benchmarks.kernels.attention_tiles import GROUPS

    yield from (("cases", family) for family in sorted(families, key=lambda name: name != "attention"))
    if set(families) == set(family_names()):
        yield from (("whole", None), ("products", None))
        yield from (("steps", index) for index in range(len(step_cases())))
        yield from (("tiles", index) for index in range(len(GROUPS)))


def step_cases() -> list[Any]:
    """The training steps of BERT that parts `steps`, `finetune` and `profile` run; one layer has all their kernels."""
    from benchmarks.models import finetuning_steps
    from benchmarks.models.step_cases import CASES

    return [*finetuning_steps.CASES, *(case for case in CASES if case.is_bert)]


def run_steps(case: Any, provider: str) -> None:
    """Evaluation and two steps of a contestant, on CPU tensors."""
    import torch

    from benchmarks.models import finetuning_steps, training_steps

    cpu = torch.device("cpu")
    is_finetuning = isinstance(case, finetuning_steps.FinetuneCase)
    module: Any = finetuning_steps if is_finetuning else training_steps
    kind: Any = finetuning_steps.FinetuneContestant if is_finetuning else training_steps.Contestant
    one_layer = replace(case.size, layers=1)
    case = type(f"OneLayer{type(case).__name__}", (type(case),), {"size": one_layer})(*astuple(case))
    contestant = kind(provider, case, module.make_batch(case, cpu), module.draw_donor(case, cpu), "eager")
    contestant.model.eval()
    with torch.no_grad():
        contestant.loss()
    contestant.model.train()
    contestant.steps(2)


def compile_one(job: Job) -> list[str]:
    """Runs what `make gpu` would, in a process with the null driver; why what does not run does not."""
    import torch

    from benchmarks.smoke.case import Skipped

    kind, what = job
    cpu, failures = torch.device("cpu"), []

    def attempt(name: str, run: Any, *arguments: Any) -> None:
        try:
            run(*arguments)
        except Skipped:  # for want of a GPU
            pass
        except Exception as failure:  # it would not run on the GPU either, which then says so
            failures.append(f"{name}: {reason(failure, 300)}")

    if kind == "cases":
        from benchmarks.kernels.timing import results_of
        from benchmarks.registry import kernel_cases

        for case in (*kernel_cases("smoke", [what]), *kernel_cases("gpu", [what])):
            attempt(case.name, lambda case=case: results_of(case.make(cpu)))
    elif kind == "whole":
        from benchmarks.smoke.whole import whole_cases

        for whole in whole_cases("smoke", is_dry=True):
            attempt(whole.name, whole.check, cpu)
    elif kind == "steps":
        for provider in ("bert_fast", "fused"):
            case = step_cases()[what]
            attempt(f"{case.name} {provider}", run_steps, case, provider)
    elif kind == "tiles":
        from benchmarks.kernels.attention_tiles import GROUPS, prepare

        attempt(GROUPS[what].name, prepare, GROUPS[what], cpu)
    else:
        from benchmarks.gemm_tuning.timing import preparations
        from benchmarks.gemm_tuning.timing import prepare as prepare_product

        gpu: Any = SimpleNamespace(type="cuda")  # under the null driver tensors say they are one's and lie on the CPU
        for product, tile in preparations(gpu):
            attempt(product.name, prepare_product, product, tile, cpu)
    return failures


def prune(cache: Path) -> tuple[int, int]:
    """Leaves in Triton's cache what is loaded from it: (kernels, bytes). Launchers are a machine's own and go."""
    kernels = size = 0
    for folder in filter(Path.is_dir, cache.iterdir()):
        files = list(folder.iterdir())
        is_kernel = any(path.suffix in KEPT[:2] for path in files)
        for path in files:
            if is_kernel and path.suffix in KEPT:
                size += path.stat().st_size
            else:
                path.unlink()
        if is_kernel:
            kernels += 1
        else:
            folder.rmdir()
    return kernels, size


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if something could not be compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="sm_90", choices=DEVICES, help="default: %(default)s")
    parser.add_argument("--families", help="kernel cases of some families only, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    options = parser.parse_args(arguments)
    families = chosen("families", options.families, family_names())
    cache = Path(os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE_VARIABLES["TRITON_CACHE_DIR"])))
    context, failures = multiprocessing.get_context("spawn"), []
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=_start, initargs=(options.device,)) as pool:
        for found in pool.map(compile_one, jobs(families)):
            failures += found
    kernels, size = prune(cache)
    print(*failures, f"{kernels} kernels, {size / 2**20:.0f} MiB: {cache}", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
