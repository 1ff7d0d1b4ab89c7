"""What the arguments of transformers' `from_pretrained` and `save_pretrained` mean here.

Each is taken with its meaning there, or changes nothing here, or is refused unless its value asks for nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bert_fast.models.config_checks import shown

# They choose how to load or compute, not what; here there is one way.
_WITHOUT_MEANING = frozenset(
    (
        "_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "allow_all_kernels", "attn_implementation",
        "disable_mmap", "experts_implementation", "from_flax", "from_tf", "low_cpu_mem_usage", "mirror",
        "offload_buffers", "offload_folder", "offload_state_dict", "save_function", "save_original_format",
        "save_peft_format", "tqdm_class", "trust_remote_code", "weights_only",
    )
)  # fmt: skip
# They ask for what is not here -> why; None, False and empty ones ask for nothing.
_NOT_HERE = {
    "adapter_kwargs": "adapters are PEFT's: peft.PeftModel.from_pretrained(model, path)",
    "adapter_name": "adapters are PEFT's: peft.PeftModel.from_pretrained(model, path)",
    "device_mesh": "a model lies on one device",
    "distributed_checkpoint": "files are written by one process",
    "distributed_config": "a model lies on one device; FSDP2 and DDP take it as it is",
    "fusion_config": "modules are what they are",
    "generation_config": "these models have no generate",
    "gguf_file": "weights are read from safetensors and PyTorch files",
    "kernel_config": "these models compute by kernels of their own",
    "max_memory": "a model lies on one device",
    "proxies": "huggingface_hub takes proxies from the environment",
    "push_to_hub": "save, then huggingface_hub.upload_folder(...)",
    "quantization_config": "weights are floating-point numbers",
    "tp_plan": "a model lies on one device",
    "tp_size": "a model lies on one device",
    "use_kernels": "these models compute by kernels of their own",
}
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def without_foreign(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments without those of transformers that have no meaning here.

    Raises: ValueError for one that asks for what is not here.
    """
    refuse_foreign(**{name: value for name, value in arguments.items() if name in _NOT_HERE})
    return {name: value for name, value in arguments.items() if name not in _WITHOUT_MEANING and name not in _NOT_HERE}


def refuse_foreign(**arguments: Any) -> None:
    """Raises ValueError where one of transformers' arguments asks for what is not here."""
    for name, value in arguments.items():
        if name == "adapter_name" and value == "default":
            continue
        if value is not None and value is not False and not (isinstance(value, Mapping) and not value):
            neutral = "False" if name in ("push_to_hub", "use_kernels", "distributed_checkpoint") else "None"
            raise ValueError(f"{name}: expected {neutral} ({_NOT_HERE[name]}), got {shown(value)}")


def one_device(device: Any, device_map: Any) -> torch.device | None:
    """Where a model goes; None where neither says so.

    device_map: a device or its name ("cuda" is that of this process where torchrun started it), the number of a GPU, a
        mapping of modules to devices that are all the same, or "auto" and kin: the first GPU, where there is one.

    Raises: ValueError for both, for what is no device, for several, and for one that PyTorch cannot use here.
    """
    if device_map is None:
        return None if device is None else _checked("device", device)
    if device is not None:
        raise ValueError(f"device_map: expected None beside device={shown(device)}, got {shown(device_map)}")
    if isinstance(device_map, Mapping):
        places = {_device_of("device_map", place) for place in device_map.values()}
        if len(places) != 1:
            got = " and ".join(sorted(map(str, places))) or "none"
            raise ValueError(f"device_map: expected one device for the whole model, got {got}")
        return _checked("device_map", places.pop())
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device_map == "cuda":
        local_rank = torch.distributed.get_node_local_rank(0) if torch.distributed.is_available() else 0
        device_map = f"cuda:{local_rank}"
    return _checked("device_map", device_map)


def _device_of(name: str, device: Any) -> torch.device:
    is_number = isinstance(device, int)
    try:
        if isinstance(device, bool) or (is_number and device < 0):
            raise ValueError("no number of a device")
        return torch.device("cuda", device) if is_number else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        got = shown(device) if isinstance(device, str | int | float) else type(device).__name__
        raise ValueError(f"{name}: expected a torch.device or its name, got {got}") from error


def _checked(name: str, given: Any) -> torch.device:
    device = _device_of(name, given)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name}: expected one that PyTorch can use here, got {str(device)!r}: {error}") from error
    return device


def renamed(state_dict: Mapping[str, Tensor], key_mapping: Any) -> dict[str, Tensor]:
    """Weights under other names: every pattern in turn is replaced once in a name that it is found in.

    Raises: TypeError, ValueError where key_mapping is no mapping from regular expressions to what replaces them, or
        gives two weights one name.
    """
    if not isinstance(key_mapping, Mapping):
        raise TypeError(f"key_mapping: expected a mapping of patterns to names, got {type(key_mapping).__name__}")
    found: dict[str, str] = {}
    for key in state_dict:
        name = key
        for pattern, replacement in key_mapping.items():
            try:
                name = re.sub(pattern, replacement, name, count=1)
            except (TypeError, re.error) as error:
                got = f"{shown(pattern)}: {shown(replacement)}"
                raise ValueError(f"key_mapping: expected regular expressions and names, got {got}: {error}") from error
        if name in found:
            raise ValueError(f"key_mapping: expected a name for each weight, got {name!r} of {found[name]} and {key}")
        found[name] = key
    return {name: state_dict[key] for name, key in found.items()}
