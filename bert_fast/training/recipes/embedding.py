"""One vector per text: tokens in batches without padding, through the encoder, pooled; files of any size."""

import os
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_choice, check_count, check_flag, check_integer
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.data.text_files import ReadOptions, TextSource
from bert_fast.data.text_sources import find_sources, read_blocks
from bert_fast.errors import CheckpointError
from bert_fast.files import path_name, write_atomically
from bert_fast.models import BertForTextEmbedding, BertModel
from bert_fast.models.checkpoint import list_names, load_checkpoint, load_into
from bert_fast.models.pooling import POOLINGS, Pooling, pooled
from bert_fast.models.sentence_folder import TextEmbedding
from bert_fast.models.shapes import check_sizes
from bert_fast.tokenization import BertTokenizer

__all__ = ["Embedded", "Embedder", "embed_files"]

_TEXTS_AT_ONCE = 16384  # vectors in memory, whatever the size of a block


@dataclass(frozen=True)
class Embedded:
    """How far `embed_files` is: texts with a vector, bytes read of the files and in all (None for streams), seconds."""

    texts: int = 0
    bytes_read: int = 0
    bytes_total: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Embedder:
    """Texts to vectors. A vector is that of its text alone, whatever else is in the batch.

    Attributes:
        model: in evaluation mode; it runs on its device and in its dtype, pooling in fp32.
        tokenizer: of the model.
        pooling: over a text's tokens, [CLS] and [SEP] among them: see `models.pooling.pooled`.
        normalize: divide every vector by its Euclidean length.
        max_length: tokens of a text, special tokens counted; what exceeds it is cut. None: as many as the model takes.
        batch_tokens: of a batch; a single text may have more.

    Raises: TypeError, ValueError naming the argument, what was expected and what came.
    """

    model: BertModel
    tokenizer: BertTokenizer
    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module) or not hasattr(self.model, "config"):
            raise TypeError(f"model: expected a BertModel, got {type(self.model).__name__}")
        check_tokenizer_kind(self.tokenizer)
        check_choice("pooling", self.pooling, POOLINGS)
        check_flag("normalize", self.normalize)
        object.__setattr__(self, "batch_tokens", check_count("batch_tokens", self.batch_tokens, 1))
        longest = self.model.config.max_position_embeddings
        if self.max_length is None:
            object.__setattr__(self, "max_length", min(longest, self.tokenizer.model_max_length))
        elif not 2 <= check_integer("max_length", self.max_length) <= longest:
            raise ValueError(f"max_length: expected 2 to {longest} (positions of the model), got {self.max_length}")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> "Embedder":
        """Of a checkpoint directory with its tokenizer; heads that it may have are not used.

        Args:
            path: the directory.
            device: of the model.
            dtype: of the model.
            options: the other attributes; pooling, normalize and max_length that are None, or not there, are the
                model's: see `BertForTextEmbedding`.

        Raises:
            CheckpointError: files are missing or broken, or a parameter of the encoder is not among them.
            ValueError, TypeError: wrong options, or files of the tokenizer.
        """
        path_name("path", path)
        _check_place(device, dtype)
        config, state_dict = BertForTextEmbedding.read_config(path), load_checkpoint(path)
        how = TextEmbedding.of(vars(config)["text_embedding"]).as_dict()
        if how["max_length"] is not None:  # what was trained; positions may be fewer
            how["max_length"] = min(how["max_length"], config.max_position_embeddings)
        options = options | {name: value for name, value in how.items() if options.get(name) is None}
        check_sizes(config, state_dict, model_name="BertModel", source=path)
        model = BertModel(config, add_pooling_layer=False)
        report = load_into(model, state_dict, source=path)
        if report.missing:
            raise CheckpointError(f"{path}: expected the whole encoder, missing: {list_names(report.missing)}")
        return cls(model.to(device, dtype).eval(), BertTokenizer.from_pretrained(path), **options)

    def embed(self, texts: Any) -> np.ndarray:
        """The vectors of texts (whatever `encode_ragged` of the tokenizer takes), in their order: float32 [n, H]."""
        ragged = self.tokenizer.encode_ragged(texts, max_length=self.max_length, dtype="int64")
        starts, lengths = ragged.cu_seqlens[:-1], np.diff(ragged.cu_seqlens)
        vectors = np.empty((len(lengths), self.model.config.hidden_size), np.float32)
        # Longest first: texts of one batch are about as long, and memory is asked for once.
        with torch.inference_mode():
            for rows in _batches(np.argsort(-lengths, kind="stable"), lengths, self.batch_tokens):
                vectors[rows] = self._vectors(ragged.ids, starts[rows], lengths[rows])
        return vectors

    def _vectors(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Of one batch, [B, H]: text i is ids[starts[i]:starts[i] + lengths[i]]."""
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
        device = self.model.device
        hidden = self.model(
            input_ids=torch.from_numpy(ids[positions + np.repeat(starts, lengths)]).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)).to(device),
            max_seqlen=int(lengths.max()),
        ).last_hidden_state  # [T, H]
        vectors = pooled(hidden, torch.from_numpy(cu_seqlens).to(device), self.pooling).float()
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()


def embed_files(
    embedder: Embedder,
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    format: str = "auto",
    field: str = "text",
    errors: str = "strict",
    report: Callable[[Embedded], None] | None = None,
) -> Embedded:
    """The vectors of all texts of files, in their order, into one file; memory does not grow with their number.

    Args:
        embedder: makes the vectors.
        files: paths, or "-" for stdin.
        output: written when all is done, else left as it was. A name that ends in .npy: an array, float32 [n, H]; in
            .parquet: a column `embedding`, lists of H float32.
        format: as in `tokenize_files`; but every line of a text file is a text, also an empty one.
        field: key of the text in JSON lines, column of Parquet files.
        errors: "strict" or "replace", see `tokenize_files`.
        report: called now and then.

    Returns: what was done.

    Raises:
        OSError: a file cannot be read or written.
        SourceError: a source is not what its format says.
        ValueError: a wrong argument, another ending of `output`.
        ImportError: a Parquet file, without pyarrow.
    """
    if not isinstance(embedder, Embedder):
        raise TypeError(f"embedder: expected an Embedder, got {type(embedder).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"report: expected a function, got {type(report).__name__}")
    options = ReadOptions(field, errors)
    path = Path(path_name("output", output))
    writer_class = _WRITERS.get(path.suffix)
    if writer_class is None:
        raise ValueError(f"output: expected a name that ends in {' or '.join(_WRITERS)}, got {path}")
    sources = find_sources(files, format, field)
    # A sentence of a document is a text of its own, and an empty line is one, so that line i belongs to row i.
    sources = [replace(source, format="lines") if source.format == "text" else source for source in sources]
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    begin, done = time.monotonic(), Embedded(bytes_total=total)

    def write(temporary: Path) -> None:
        nonlocal done
        with writer_class(temporary, embedder.model.config.hidden_size) as writer:
            for texts, bytes_read in _read(sources, options):
                vectors = embedder.embed(texts)
                writer.add(vectors)
                done = Embedded(done.texts + len(vectors), bytes_read, total, time.monotonic() - begin)
                if report is not None:
                    report(done)

    write_atomically(path, write)
    return done


def _check_place(device: Any, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating-point dtype, got {reprlib.repr(dtype)}")
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device: expected a device, got {reprlib.repr(device)} ({error})") from None


def _batches(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """`order` in pieces whose lengths add up to `batch_tokens` at most, but for single texts that are longer."""
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = ends[first - 1] if first else 0
        stop = max(int(np.searchsorted(ends, before + batch_tokens, side="right")), first + 1)
        yield order[first:stop]
        first = stop


def _read(sources: Sequence[TextSource], options: ReadOptions) -> Iterator[tuple[Any, int]]:
    """(some texts, bytes read of all sources up to them), few enough for their vectors to lie in memory."""
    before = 0
    for source in sources:
        for block in read_blocks(source, options):
            read = before + block.bytes_on_disk
            if isinstance(block.texts, tuple):
                data, boundaries = block.texts
                for start in range(0, len(boundaries) - 1, _TEXTS_AT_ONCE):
                    yield (data, boundaries[start : start + _TEXTS_AT_ONCE + 1]), read
            else:
                for start in range(0, len(block.texts), _TEXTS_AT_ONCE):
                    yield block.texts[start : start + _TEXTS_AT_ONCE], read
        before += source.size or 0


class _NpyWriter:
    """An .npy file, whose number of rows is written last: NumPy's headers leave room for it."""

    def __init__(self, path: Path, width: int) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._width, self._rows = width, 0
        self._write_header()

    def __enter__(self) -> "_NpyWriter":
        return self

    def add(self, vectors: np.ndarray) -> None:
        """Rows [n, width], fp32."""
        self._rows += len(vectors)
        self._file.write(vectors.astype("<f4", copy=False).tobytes())

    def __exit__(self, *error: object) -> None:
        with self._file:
            self._write_header()

    def _write_header(self) -> None:
        self._file.seek(0)
        shape = (self._rows, self._width)
        np.lib.format.write_array_header_1_0(self._file, {"descr": "<f4", "fortran_order": False, "shape": shape})


class _ParquetWriter:
    """A Parquet file with one column, `embedding`: lists of `width` numbers."""

    def __init__(self, path: Path, width: int) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError(f"Parquet needs pyarrow: pip install bert_fast[parquet] ({error})") from error
        self._arrow, self._width = pyarrow, width
        self._schema = pyarrow.schema([("embedding", pyarrow.list_(pyarrow.float32(), width))])
        self._writer = parquet.ParquetWriter(path, self._schema)

    def __enter__(self) -> "_ParquetWriter":
        return self

    def add(self, vectors: np.ndarray) -> None:
        """Rows [n, width], fp32."""
        column = self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(vectors.reshape(-1)), self._width)
        self._writer.write_table(self._arrow.table([column], schema=self._schema))

    def __exit__(self, *error: object) -> None:
        self._writer.close()


_WRITERS: dict[str, Any] = {".npy": _NpyWriter, ".parquet": _ParquetWriter}
