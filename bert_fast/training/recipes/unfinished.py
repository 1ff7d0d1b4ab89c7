"""The vectors of a run that is not done, on the disk: whatever ends it, another run goes on behind them."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.data.digests import Digest, check_seal, seal
from bert_fast.errors import SourceError
from bert_fast.files import is_temporary, sync_directory, write_atomically
from bert_fast.training.recipes.vector_files import npy_header

__all__ = ["UnfinishedVectors", "partial_folder"]

_VECTORS, _PROGRESS = "vectors.npy", "progress.json"


def partial_folder(output: Path) -> Path:
    """The folder `<output>.partial`, where a run works."""
    return output.with_name(f"{output.name}.partial")


class UnfinishedVectors:
    """The folder of one run at a time: `vectors.npy`, which grows, and `progress.json`, how much of it counts.

    The file of vectors is on the disk before `progress.json` says so, and that is replaced in one step: a run may be
    killed anywhere.

    Args:
        output: where the vectors go in the end; the folder is `<output>.partial`.
        width: numbers of a vector.
        settings: all that decides what the vectors of texts are, and the names of the files, as JSON has it.
        resume: go on with what is there; else begin again.

    Attributes:
        resumed: texts that earlier runs did.

    Raises:
        OSError: the folder cannot be written, or another process writes it.
        ValueError: what is there was begun with other settings, or is damaged.
    """

    def __init__(self, output: Path, width: int, settings: dict[str, Any], resume: bool) -> None:
        self.folder, self._done = partial_folder(output), (0, 0, "")
        self._output, self._width, self._settings = output, width, settings
        self._digest = Digest()
        if not output.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(output.parent))
        self.folder.mkdir(exist_ok=True)
        descriptor = os.open(self.folder / _VECTORS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file = open(descriptor, "r+b")  # noqa: SIM115  (closed by close)
        try:
            self._lock()
            for path in self.folder.iterdir():  # of a run that was killed while it wrote one
                if is_temporary(path.name, self.folder / _PROGRESS):
                    path.unlink()
            # Without a byte, it is not the file that the progress is of: that went to its place.
            if resume and os.fstat(descriptor).st_size:
                self._read_progress()
            else:
                (self.folder / _PROGRESS).unlink(missing_ok=True)
            self._file.seek(0)
            npy_header(self._file, 0, width)
            self._file.flush()
            self._start = self._file.tell()
            self._cut()
            self.resumed, _, self._expected = self._recorded = self._done
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{self.folder}: another process is writing it") from None

    def _read_progress(self) -> None:
        path = self.folder / _PROGRESS
        try:
            content = json.loads(path.read_bytes())
            check_seal(content)
            found = content["settings"]
            self._done = (content["texts"], content["tokens"], content["texts_digest"])
        except FileNotFoundError:
            return  # it was killed before it had anything
        except (ValueError, KeyError, RecursionError) as error:
            raise ValueError(f"resume: {path}: is damaged ({error}); begin again without it") from None
        for name, value in self._settings.items():
            if found.get(name) != value:
                raise ValueError(
                    f"resume: {self.folder}: was begun with another {name}: expected {found.get(name)!r}, got "
                    f"{value!r}; begin again without it"
                )

    def _cut(self) -> None:
        """Drops what was written behind the last record."""
        end = self._start + 4 * self._width * self.texts
        size = os.fstat(self._file.fileno()).st_size
        if size < end:
            raise ValueError(
                f"resume: {self.folder / _VECTORS}: expected at least {end} bytes, got {size}; begin again without it"
            )
        self._file.truncate(end)
        self._file.seek(end)

    def skip(self, groups: Iterator[Any]) -> Iterator[tuple[Any, str]]:
        """The groups of texts behind those that are done, each with the digest of all texts up to its end.

        Those that are done are read, too, and compared with what was embedded.

        Raises:
            SourceError: other texts than before.
        """
        read = 0
        for group in groups:
            group.add_to(self._digest)
            if read >= self.resumed:
                yield group, self._digest.hexdigest()
                continue
            read += len(group)
            if read >= self.resumed and (read, self._digest.hexdigest()) != (self.resumed, self._expected):
                raise SourceError(self._changed())
        if read < self.resumed:
            raise SourceError(self._changed())

    def _changed(self) -> str:
        return (
            f"resume: {self.folder}: expected the {self.resumed:,} texts that were embedded before, got others; begin "
            "again without it"
        )

    def add(self, vectors: np.ndarray, tokens: int, texts_digest: str) -> None:
        """Rows [n, width], fp32, of texts with so many tokens; the digest is that of all texts up to here."""
        self._file.write(vectors.astype("<f4", copy=False).tobytes())
        # At once: Ctrl-C comes between any two steps.
        self._done = (self.texts + len(vectors), self.tokens + tokens, texts_digest)

    def record(self) -> None:
        """Makes what was added outlive the process and the machine."""
        texts, tokens, digest = self._done
        if not texts or self._done == self._recorded:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        content = {"settings": self._settings, "texts": texts, "tokens": tokens, "texts_digest": digest}
        text = json.dumps(seal(content), indent=1).encode() + b"\n"
        write_atomically(self.folder / _PROGRESS, lambda temporary: temporary.write_bytes(text))
        self._recorded = (texts, tokens, digest)

    @property
    def texts(self) -> int:
        """How many are done."""
        return self._done[0]

    @property
    def tokens(self) -> int:
        """Of these."""
        return self._done[1]

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """All vectors, float32 [n, width] with n up to `rows`."""
        self._file.flush()
        self._file.seek(self._start)
        for first in range(0, self.texts, rows):
            count = min(rows, self.texts - first)
            yield np.frombuffer(self._file.read(4 * count * self._width), "<f4").reshape(count, self._width)

    def finish(self, writer: Any) -> None:
        """Puts the vectors in their place: this file for .npy (no writer), else one that the writer makes of them."""
        if writer is None:
            self._file.seek(0)
            npy_header(self._file, self.texts, self._width)
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self.folder / _VECTORS, self._output)
            sync_directory(self._output.parent)
            return

        def write(temporary: Path) -> None:
            with writer(temporary, self._width) as made:
                for vectors in self.blocks(16384):
                    made.add(vectors)

        write_atomically(self._output, write)

    def remove(self) -> None:
        """Takes the folder away, with the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._file.close()

    def close(self) -> None:
        """Ends the run; what was recorded stays, and a folder in which nothing was goes."""
        if self._file.closed:
            return
        if (self.folder / _PROGRESS).exists():
            self._file.close()
        else:
            self.remove()
