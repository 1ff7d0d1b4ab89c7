"""Names of the Hugging Face hub (`google-bert/bert-base-uncased`) in place of paths.

Downloads are those of the optional package huggingface_hub: its cache, its environment variables (`HF_HUB_OFFLINE`,
`HF_HOME`, `HF_TOKEN`), its partial-download handling. A file is fetched when it is read: of the weights only the first
format that the repository has, of a tokenizer its few files.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from bert_fast.errors import CheckpointError

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_NAME = re.compile(r"(?!.{97})\w[\w.-]*(/\w[\w.-]*)?")  # the hub's own rule: at most 96 characters
_FILE_SUFFIXES = (".bin", ".json", ".pt", ".pth", ".safetensors")


class FileAbsent(CheckpointError):
    """A repository, or the cache of it where the hub was not reached, has none of the files."""


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is no local file or directory, but could be `name` or `owner/name` of a repository."""
    name = os.fspath(path)
    return bool(_NAME.fullmatch(name)) and not name.endswith(_FILE_SUFFIXES) and not os.path.exists(name)


def take_hub_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes from keyword arguments those that say how to download, and from where; returns them.

    Raises: TypeError for a subfolder that is no name.
    """
    options = {name: arguments.pop(name) for name in HUB_OPTIONS if name in arguments}
    if "subfolder" in options:
        subfolder = options.pop("subfolder")
        if subfolder is not None and not isinstance(subfolder, str | os.PathLike):
            raise TypeError(f"subfolder: expected a name or None, got {type(subfolder).__name__}")
        if subfolder is not None and os.fspath(subfolder):
            options["subfolder"] = os.fspath(subfolder)
    return options


def local_place(path: str, options: Mapping[str, Any]) -> str:
    """A directory's subfolder, if the options name one; a file stays what it is."""
    return os.path.join(path, options["subfolder"]) if "subfolder" in options and os.path.isdir(path) else path


def fetch_first(name: str, file_names: Iterable[str], options: Mapping[str, Any]) -> Path:
    """The local path of the first of some files that a repository has, downloaded if the cache lacks it.

    Args:
        name: `owner/name`, or `name` alone for the oldest repositories.
        file_names: in order of preference.
        options: `HUB_OPTIONS` as huggingface_hub understands them.

    Raises:
        CheckpointError: huggingface_hub is not installed; the repository has none of the files, or is not there or not
            open to this token; there is no network (or `local_files_only`) and the cache lacks them. One line that says
            which of them it is, and what to do.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
        errors = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such file or directory; names of the Hugging Face hub need the package huggingface_hub: pip "
            "install huggingface_hub"
        ) from error
    wanted, answer = list(file_names), True
    for file_name in wanted:
        try:
            return Path(hub.hf_hub_download(name, file_name, **options))
        except errors.LocalEntryNotFoundError:
            answer, options = False, {**options, "local_files_only": True}  # not to be waited for once more
        except errors.EntryNotFoundError:
            continue
        except errors.GatedRepoError as error:
            raise CheckpointError(f"{name}: ask for access on its page of the hub, then run `hf auth login`") from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{name}: no such file or directory, and no model of this name on the hub; a private one needs `hf "
                "auth login`"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name}: no such file or directory, nor on the hub: {_first_line(error)}") from error
    files = " or ".join(wanted if "subfolder" not in options else [f"{options['subfolder']}/{one}" for one in wanted])
    at = "" if options.get("revision") is None else f", revision {options['revision']}"
    if answer:
        raise FileAbsent(f"{name}: expected a repository of the hub with {files}{at}, got one without")
    cache = Path(options.get("cache_dir") or hub.constants.HF_HUB_CACHE)
    if (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir():
        lacks = f"the cache of the hub, {cache}, has this name without {files}{at}"
    else:
        lacks = f"the cache of the hub, {cache}, has nothing of this name"
    raise FileAbsent(
        f"{name}: no such file or directory; {lacks}, and the hub was not reached (offline): run it once with a "
        "network, or name a folder"
    )


def fetch_together(name: str, first: Sequence[str], others: Iterable[str], options: Mapping[str, Any]) -> Path:
    """The local directory with the first of some files that a repository has, and those of `others` that it has.

    All of one commit. Arguments and errors: see `fetch_first`.
    """
    found = fetch_first(name, first, options)
    place = PurePosixPath(str(options.get("subfolder", "")), *found.parts[-1:])
    commit = found.parents[len(place.parts) - 1].name
    for other in others:
        with contextlib.suppress(FileAbsent):
            fetch_first(name, [other], {**options, "revision": commit})
    return found.parent


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
