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
from bert_fast.files import path_name, path_string
from bert_fast.hub import is_hub_name, local_place, take_hub_options
from bert_fast.models.checkpoint import (
    LoadReport,
    fetch_weights,
    find_weights,
    list_names,
    load_checkpoint,
    load_into,
    weights_names,
)
from bert_fast.models.checkpoint_writer import save_checkpoint
from bert_fast.models.config import BertConfig
from bert_fast.models.config_checks import is_parameter_dtype, shown
from bert_fast.models.foreign_arguments import one_device, renamed, without_foreign
from bert_fast.models.initial_values import draw, weights_follow
from bert_fast.models.shapes import check_sizes

ModelT = TypeVar("ModelT", bound="PretrainedMixin")


class PretrainedMixin:
    """Loading from and saving to a checkpoint directory, for a module whose constructor takes a `BertConfig`."""

    config: BertConfig

    @classmethod
    def from_pretrained(
        cls: type[ModelT],
        path: str | os.PathLike[str] | None = None,
        *model_args: Any,
        config: BertConfig | str | os.PathLike[str] | Any | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: Any = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
        use_safetensors: bool | None = None,
        variant: str | None = None,
        key_mapping: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> ModelT:
        """Builds the model and loads its weights; parameters that the file lacks keep their random initial values.

        Nothing is built before the sizes of the configuration are compared with those of the weights.
        Warns with the names of parameters that the file lacks and of its entries that the model has no use for.

        Args:
            path: a checkpoint directory, a weights file with a configuration beside it, or a name on the hub.
            *model_args: arguments of the constructor behind the configuration.
            config: replaces the configuration stored beside the weights; ours or transformers', or where it is stored.
            dtype: of the parameters; None (or "auto"): as the configuration says, else as stored.
            device: where the parameters go; None: the CPU.
            device_map: the same, as transformers says it: see `foreign_arguments.one_device`.
            ignore_mismatched_sizes: parameters of another shape, such as a head for another number of classes, keep
                their initial values, with a warning, instead of raising.
            output_loading_info: return the model and a dictionary of sets, missing_keys, unexpected_keys and
                mismatched_keys (name, the file's shape, the model's), and a list, error_msgs.
            state_dict: weights in place of files; path must be None then, and config given.
            use_safetensors: only such files, or none of them.
            variant: "fp16" for model.fp16.safetensors and so on.
            key_mapping: regular expressions and what replaces them in the names of weights.
            **overrides: fields of the configuration (`num_labels=3`), further arguments of the constructor, `subfolder`
                of a directory or a name on the hub, and for the latter `revision`, `token`, `cache_dir`,
                `local_files_only` and `force_download`. Other arguments of transformers: see `foreign_arguments`.

        Returns: the model in evaluation mode.

        Raises:
            CheckpointError: files missing, broken or not fitting the model; the message names them.
            TypeError, ValueError: a wrong configuration or argument.
        """
        if "pretrained_model_name_or_path" in overrides:
            given = overrides.pop("pretrained_model_name_or_path")
            path = given if path is None else path
        check_flag("ignore_mismatched_sizes", ignore_mismatched_sizes)
        check_flag("output_loading_info", output_loading_info)
        names = weights_names(variant, use_safetensors)
        device = one_device(device, device_map)
        overrides = without_foreign(overrides)
        options = take_hub_options(overrides)
        if state_dict is None:
            path = local_place(path_string("path", path), options)
        elif path is not None or config is None:
            name, wanted, got = ("config", "a configuration", None) if path is None else ("path", "None", path)
            raise ValueError(f"{name}: expected {wanted} beside state_dict, got {shown(got)}")
        on_hub = path is not None and is_hub_name(path)
        if path is not None and not on_hub and not os.path.exists(path):
            raise CheckpointError(f"{path or 'path'}: no such file or directory")
        if "torch_dtype" in overrides:  # the name before transformers 4.56
            old_dtype = overrides.pop("torch_dtype")
            dtype = old_dtype if dtype is None else dtype
        accepted = list(inspect.signature(cls).parameters)[1:]  # all but the configuration
        arguments = {name: overrides.pop(name) for name in accepted if name in overrides}
        if config is None:
            assert path is not None
            place = path if on_hub or os.path.isdir(path) else Path(path).parent
            config = cls.read_config(place, **overrides, **(options if on_hub else {}))
        elif isinstance(config, str | os.PathLike):
            config = cls.read_config(config, **overrides, **options)
        else:
            config = BertConfig.from_hf(config).with_overrides(**overrides)
        if state_dict is None:
            assert path is not None
            found = fetch_weights(path, options, names) if on_hub else path
            state_dict = load_checkpoint(find_weights(found, names) if os.path.isdir(found) else found)
        if key_mapping is not None:
            state_dict = renamed(state_dict, key_mapping)
        source = "state_dict" if path is None else path
        check_sizes(
            config,
            state_dict,
            model_name=cls.__name__,
            source=source,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
        )
        resolved_dtype = _resolve_dtype(dtype, config, state_dict)
        with weights_follow():
            try:
                model = cls(config, *model_args, **arguments)  # type: ignore[call-arg]
            except ValueError as error:  # fields that no model goes with
                raise ValueError(f"{source}: {error}") from error
            assert isinstance(model, nn.Module)
            model.to(device=device, dtype=resolved_dtype)
            report = load_into(model, state_dict, ignore_mismatched_sizes=ignore_mismatched_sizes, source=source)
            not_loaded = [*report.missing, *(mismatch.name for mismatch in report.mismatched)]
            draw(model, not_loaded, model._init_weights)
        _warn(cls.__name__, source, report)
        model.eval()
        return (model, _loading_info(model, report)) if output_loading_info else model

    @classmethod
    def read_config(cls, path: str | os.PathLike[str], **overrides: Any) -> BertConfig:
        """The configuration of a directory, or a name on the hub, with what a model of this class finds beside it.

        Arguments and errors: see `BertConfig.from_pretrained`.
        """
        return BertConfig.from_pretrained(path, **overrides)

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        safe_serialization: bool = True,
        **others: Any,
    ) -> Path:
        """Writes a directory that `from_pretrained` and `transformers.AutoModel.from_pretrained` open.

        is_main_process: where False, nothing is written. safe_serialization: only True. others: arguments of
            transformers that change nothing, see `foreign_arguments`; push_to_hub only as False.
        See `checkpoint_writer.save_checkpoint` for the others, errors and what a reader sees if it is interrupted.
        """
        assert isinstance(self, nn.Module)
        check_flag("is_main_process", is_main_process)
        check_flag("safe_serialization", safe_serialization)
        if not safe_serialization:
            raise ValueError("safe_serialization: expected True (weights are written as safetensors), got False")
        others.pop("token", None)
        if unknown := without_foreign(others):
            raise TypeError(
                f"save_pretrained: expected arguments of transformers' save_pretrained, got {min(unknown)!r}"
            )
        if not is_main_process:
            return Path(path_name("directory", directory))
        return save_checkpoint(
            directory, self, self.config, max_shard_size=max_shard_size, variant=variant, state_dict=state_dict
        )


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


def _loading_info(model: nn.Module, report: LoadReport) -> dict[str, Any]:
    """A report as transformers gives it."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    return {
        "missing_keys": set(report.missing),
        "unexpected_keys": set(report.unexpected),
        "mismatched_keys": {(one.name, one.found or shapes[one.name], shapes[one.name]) for one in report.mismatched},
        "error_msgs": [],
    }


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
