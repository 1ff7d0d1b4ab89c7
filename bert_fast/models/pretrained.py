"""`from_pretrained` and `save_pretrained` for every model class."""

import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bert_fast.checks import check_flag
from bert_fast.errors import CheckpointError
from bert_fast.files import path_string
from bert_fast.models.checkpoint import LoadReport, fetch_weights, list_names, load_checkpoint, load_into
from bert_fast.models.checkpoint_writer import save_checkpoint
from bert_fast.models.config import BertConfig
from bert_fast.models.config_checks import is_parameter_dtype, shown
from bert_fast.models.hub import is_hub_name, take_hub_options
from bert_fast.models.initial_values import draw, weights_follow
from bert_fast.models.shapes import check_sizes

__all__ = ["PretrainedMixin"]

ModelT = TypeVar("ModelT", bound="PretrainedMixin")

# Arguments of transformers that choose how to load or compute; here they change nothing.
_WITHOUT_MEANING_HERE = frozenset(("attn_implementation", "low_cpu_mem_usage", "trust_remote_code", "use_safetensors"))


class PretrainedMixin:
    """Loading from and saving to a checkpoint directory, for a module whose constructor takes a `BertConfig`."""

    config: BertConfig

    @classmethod
    def from_pretrained(
        cls: type[ModelT],
        path: str | os.PathLike[str],
        *,
        config: BertConfig | Any | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        ignore_mismatched_sizes: bool = False,
        **overrides: Any,
    ) -> ModelT:
        """Builds the model and loads its weights; parameters that the file lacks keep their random initial values.

        Nothing is built before the sizes of the configuration are compared with those of the weights.
        Warns with the names of parameters that the file lacks and of its entries that the model has no use for.

        Args:
            path: a checkpoint directory, a weights file with a configuration beside it, or a name on the hub.
            config: replaces the configuration stored beside the weights; ours or transformers'.
            dtype: of the parameters; None (or "auto"): as the configuration says, else as stored.
            device: where the parameters go; None: the CPU.
            ignore_mismatched_sizes: parameters of another shape, such as a head for another number of classes, keep
                their initial values, with a warning, instead of raising.
            **overrides: fields of the configuration (`num_labels=3`), further arguments of the constructor, and for
                names on the hub `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.

        Returns: the model in evaluation mode.

        Raises:
            CheckpointError: files missing, broken or not fitting the model; the message names them.
            TypeError, ValueError: a wrong configuration or argument.
        """
        path = path_string("path", path)
        check_flag("ignore_mismatched_sizes", ignore_mismatched_sizes)
        _check_device(device)
        options, on_hub = take_hub_options(overrides), is_hub_name(path)
        if not on_hub and not os.path.exists(path):
            raise CheckpointError(f"{path or 'path'}: no such file or directory")
        if "torch_dtype" in overrides:  # the name before transformers 4.56
            old_dtype = overrides.pop("torch_dtype")
            dtype = old_dtype if dtype is None else dtype
        overrides = {name: value for name, value in overrides.items() if name not in _WITHOUT_MEANING_HERE}
        accepted = list(inspect.signature(cls).parameters)[1:]  # all but the configuration
        arguments = {name: overrides.pop(name) for name in accepted if name in overrides}
        if config is None:
            place = path if on_hub or os.path.isdir(path) else Path(path).parent
            config = cls.read_config(place, **overrides, **options)
        else:
            config = BertConfig.from_hf(config).with_overrides(**overrides)
        state_dict = load_checkpoint(fetch_weights(path, options) if on_hub else path)
        check_sizes(
            config,
            state_dict,
            model_name=cls.__name__,
            source=path,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
        )
        resolved_dtype = _resolve_dtype(dtype, config, state_dict)
        with weights_follow():
            try:
                model = cls(config, **arguments)  # type: ignore[call-arg]
            except ValueError as error:  # fields that no model goes with
                raise ValueError(f"{path}: {error}") from error
            assert isinstance(model, nn.Module)
            model.to(device=device, dtype=resolved_dtype)
            report = load_into(model, state_dict, ignore_mismatched_sizes=ignore_mismatched_sizes, source=path)
            not_loaded = [*report.missing, *(mismatch.name for mismatch in report.mismatched)]
            draw(model, not_loaded, model._init_weights)
        _warn(cls.__name__, path, report)
        model.eval()
        return model

    @classmethod
    def read_config(cls, path: str | os.PathLike[str], **overrides: Any) -> BertConfig:
        """The configuration of a directory, or a name on the hub, with what a model of this class finds beside it.

        Arguments and errors: see `BertConfig.from_pretrained`.
        """
        return BertConfig.from_pretrained(path, **overrides)

    def save_pretrained(self, directory: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> Path:
        """Writes a directory that `from_pretrained` and `transformers.AutoModel.from_pretrained` open.

        See `checkpoint_writer.save_checkpoint` for arguments, errors and what a reader sees if it is interrupted.
        """
        assert isinstance(self, nn.Module)
        return save_checkpoint(directory, self, self.config, max_shard_size=max_shard_size)


def _resolve_dtype(
    dtype: torch.dtype | str | None, config: BertConfig, state_dict: Mapping[str, Tensor]
) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        # Stored numbers of one byte become fp32: no model computes in them.
        return config.dtype or next((t.dtype for t in state_dict.values() if is_parameter_dtype(t.dtype)), None)
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not is_parameter_dtype(resolved):
        raise ValueError(f"dtype: expected a floating-point torch.dtype, its name or 'auto', got {shown(dtype)}")
    return resolved


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        device = torch.device("" if isinstance(device, bool) else device)
    except (RuntimeError, TypeError, ValueError) as error:
        got = repr(device) if isinstance(device, str | int | float) else type(device).__name__
        raise ValueError(f"device: expected a torch.device or its name, got {got}") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device: expected one that PyTorch can use here, got {str(device)!r}: {error}") from error


def _warn(model_name: str, path: str | os.PathLike[str], report: LoadReport) -> None:
    notes = []
    if report.missing:
        notes.append(f"not in the file, left at their initial values: {list_names(report.missing)}")
    if report.unexpected:
        notes.append(f"in the file, not used: {list_names(report.unexpected)}")
    if report.mismatched:
        notes.append(f"of another shape, left at their initial values: {list_names(report.mismatched)}")
    if notes:
        warnings.warn(f"{model_name} from {path}: " + "; ".join(notes), stacklevel=3)
