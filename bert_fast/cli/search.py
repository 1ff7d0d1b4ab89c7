"""`bert-fast search`: the texts nearest to queries, by the vectors that `bert-fast embed` wrote."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bert_fast.cli.common import find_device, loaded, positive
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.embedding import Embedder
    from bert_fast.training.recipes.reranking import CrossEncoder

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast search`."""
    from bert_fast.data.text_sources import FORMATS
    from bert_fast.training.recipes.search import SIMILARITIES

    parser.description = (
        "Finds the vectors of an index that are most similar to those of queries: all are compared, piece by piece, "
        "so that the index may be larger than memory. Prints a JSON object per query."
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory with its tokenizer, as given to embed")
    parser.add_argument("index", metavar="INDEX", help="what embed wrote: .npy, .parquet or .arrow")
    parser.add_argument("queries", nargs="+", metavar="QUERIES", help="files, a query a line; - is stdin")
    parser.add_argument("--top-k", type=positive, default=10, metavar="N", help="of a query; default: %(default)s")
    parser.add_argument(
        "--similarity", choices=SIMILARITIES, default="cosine", help="of two vectors; default: %(default)s"
    )
    parser.add_argument(
        "--texts", nargs="+", metavar="FILE", help="the files that were embedded, in their order: for texts in results"
    )
    parser.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", help="of --texts; default: as embed takes them"
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="of --texts, as of embed; default: %(default)s")
    parser.add_argument(
        "--rerank", metavar="MODEL",
        help="a cross-encoder, a classifier with one label, orders what was found by its scores; needs --texts",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="PATH", help="JSON lines; default: stdout")
    parser.add_argument("--batch-tokens", type=positive, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: cuda if there is one, else cpu"
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the models; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """Searches; returns 0, or 1 where something cannot be read or written, or the index is of another model."""
    from bert_fast.files import write_atomically

    try:
        if arguments.rerank is not None and not arguments.texts:
            raise ValueError("--rerank: expected --texts beside it, which it reads, got none")
        found = _Search(arguments)
        if arguments.output is None:
            found.write(sys.stdout)
        else:

            def write(temporary: Path) -> None:
                with open(temporary, "w", encoding="utf-8") as file:
                    found.write(file)

            write_atomically(Path(arguments.output), write)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        print(printable(f"bert-fast search: {error}"), file=sys.stderr)
        return 1
    return 0


class _Search:
    """Models, index and files that the arguments name, all looked at before anything is searched."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from bert_fast.training.recipes.embedding_files import find_texts
        from bert_fast.training.recipes.search import Index

        self._arguments = arguments
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision]
        device = find_device(arguments.device)
        self._queries = find_texts(arguments.queries, "lines", "text")
        self._texts = find_texts(arguments.texts or [], arguments.format, arguments.field)
        if any(source.is_stream for source in self._texts):
            raise ValueError("--texts: expected files, which can be read for every search, got a stream")
        self._index = Index(arguments.index, arguments.similarity)
        self._embedder: Embedder = loaded(lambda: self._load_embedder(device, dtype))
        if self._index.info is None:
            note = f"{arguments.index}.json is not there: whether the vectors are of this model is not known"
            print(printable(f"bert-fast search: {note}; queries are embedded as its files say"), file=sys.stderr)
        self._reranker: CrossEncoder | None = None
        if arguments.rerank is not None:
            self._reranker = loaded(lambda: self._load_reranker(device, dtype))

    def _load_embedder(self, device: Any, dtype: Any) -> "Embedder":
        """The model, seen to be that of the index; it treats queries as the texts were treated."""
        from bert_fast.training.recipes.embedding import Embedder

        arguments = self._arguments
        return self._index.fitted(
            Embedder.from_pretrained(arguments.model, device=device, dtype=dtype, batch_tokens=arguments.batch_tokens)
        )

    def _load_reranker(self, device: Any, dtype: Any) -> "CrossEncoder":
        from bert_fast.training.recipes.reranking import CrossEncoder

        arguments = self._arguments
        return CrossEncoder.from_pretrained(
            arguments.rerank, device=device, dtype=dtype, batch_tokens=arguments.batch_tokens
        )

    def write(self, file: IO[str]) -> None:
        """A JSON object per query."""
        for answer in self._answers():
            # Halves of surrogate pairs cannot be encoded, and a terminal must not obey what data says.
            file.write(printable(json.dumps(answer, ensure_ascii=False)) + "\n")
        file.flush()

    def _answers(self) -> Iterator[dict[str, Any]]:
        from bert_fast.data.text_files import ReadOptions
        from bert_fast.training.recipes.embedding_files import read_groups
        from bert_fast.training.recipes.search import search
        from bert_fast.training.recipes.text_rows import read_rows

        for group in read_groups(self._queries, ReadOptions()):
            queries = [group.text(place) for place in range(len(group))]
            scores, rows = search(self._index, self._embedder.embed(queries), self._arguments.top_k)
            results = [
                [{"row": row, "score": _shortest(score)} for row, score in zip(*found, strict=True)]
                for found in zip(rows.tolist(), scores, strict=True)
            ]
            if self._texts:
                texts = read_rows(self._texts, rows.reshape(-1).tolist(), self._arguments.field)
                for result in results:
                    for one in result:
                        one["text"] = texts[one["row"]]
            if self._reranker is not None:
                results = self._reranked(self._reranker, queries, results)
            for query, result in zip(queries, results, strict=True):
                yield {"query": query, "results": result}

    @staticmethod
    def _reranked(model: "CrossEncoder", queries: list[str], results: list[list[dict]]) -> list[list[dict]]:
        """The same, ordered by the model's scores, of equal ones the smaller row first."""
        left = [query for query, result in zip(queries, results, strict=True) for _ in result]
        scores = iter(model.scores(left, [one["text"] for result in results for one in result]))
        ordered = []
        for result in results:
            scored = [{**one, "score": _shortest(next(scores)), "similarity": one["score"]} for one in result]
            ordered.append(sorted(scored, key=lambda one: (-one["score"], one["row"])))
        return ordered


def _shortest(score: Any) -> float:
    """The number with the fewest digits that fp32 rounds to this score."""
    return float(str(score))
