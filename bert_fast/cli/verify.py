"""`bert-fast verify`: whether the bytes of token stores and checkpoints are still those that were written."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bert_fast.errors import CheckpointError, StoreError
from bert_fast.terminal import printable

__all__ = ["add_arguments", "run"]

_AS_WRITTEN, _UNKNOWN = "as it was written", "has no digests: nothing is known of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast verify`."""
    parser.description = (
        "Reads token stores, checkpoints and all that training runs hold of them, and compares every byte with the "
        "digests that were taken when they were written. A store of 100 GB takes minutes."
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="DIR", help="a token store, a checkpoint or a run")


def run(arguments: argparse.Namespace) -> int:
    """Verifies; returns 0, or 1 where something is damaged or nothing can be verified."""
    status = 0
    for path in arguments.paths:
        found = list(_parts(path))
        if not found:
            print(printable(f"bert-fast verify: {path}: holds no token store and no checkpoint"), file=sys.stderr)
            status = 1
        for part, is_store in found:
            try:
                has_digests = _verify(part, is_store)
            except (CheckpointError, StoreError) as error:
                print(printable(f"bert-fast verify: {error}"), file=sys.stderr)
                status = 1
            else:
                print(printable(f"{part}: {_AS_WRITTEN if has_digests else _UNKNOWN}"))
    return status


def _parts(path: Path) -> Iterator[tuple[Path, bool]]:
    """Every store and checkpoint at a path or below it, and whether it is a store."""
    from bert_fast.data.token_store import STORE
    from bert_fast.training.checkpoints import STATE

    for file in sorted([*path.rglob(STORE), *path.rglob(STATE)]):
        yield file.parent, file.name == STORE


def _verify(part: Path, is_store: bool) -> bool:
    """Whether there are digests to compare with; raises CheckpointError or StoreError where they differ."""
    if is_store:
        from bert_fast.data import TokenStore

        return TokenStore.open(part).verify()
    from bert_fast.training.checkpoints import check_files

    return check_files(part)
