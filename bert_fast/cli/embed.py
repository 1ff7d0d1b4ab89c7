"""`bert-fast embed`: one vector per text, of files of any size."""

import argparse
import sys
from typing import TYPE_CHECKING

from bert_fast.cli.common import find_device, loaded, positive, progress
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.embedding_files import Embedded

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast embed`."""
    from bert_fast.data.text_sources import FORMATS
    from bert_fast.models.pooling import POOLINGS

    parser.description = (
        "Writes one vector per text, in the order of the texts: a line of a text file (an empty one, too), a record "
        "of JSON lines, a row of Parquet. Memory use does not grow with the input; the output appears when it is done. "
        "When it is interrupted or killed, the same command with --resume goes on where it was; the output is then the "
        "same as that of one run."
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory with its tokenizer")
    parser.add_argument("files", nargs="+", metavar="FILE", help="read one after the other; - is stdin")
    parser.add_argument(
        "-o", "--output", required=True, metavar="PATH", help="a name that ends in .npy, .parquet or .arrow"
    )
    parser.add_argument("--pooling", choices=POOLINGS, help="over tokens; default: as the model's files say, else mean")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="make vectors of length 1; default: likewise"
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens of a text, the rest is cut; default: as the model's files say, else all it takes",
    )
    parser.add_argument(
        "--batch-tokens", type=positive, default=16384, metavar="N", help="tokens of a batch; default: %(default)s"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: cuda if there is one, else cpu"
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the model; default: %(default)s"
    )
    parser.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", help="default: by the ending of each name, else text"
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="key or column of the text; default: %(default)s"
    )
    parser.add_argument(
        "--errors", choices=["strict", "replace"], default="strict",
        help="bytes that are not UTF-8 end the run with their place, or count as U+FFFD; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="go on with what an interrupted run left; without it, begin again"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def run(arguments: argparse.Namespace) -> int:
    """Embeds; returns 0, 1 where something cannot be read or written, 130 when interrupted."""
    import torch

    from bert_fast.training.recipes.embedding import Embedder
    from bert_fast.training.recipes.embedding_files import embed_files

    last: list[Embedded] = []
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    try:
        embedder = loaded(
            lambda: Embedder.from_pretrained(
                arguments.model,
                device=find_device(arguments.device),
                dtype=dtypes[arguments.precision],
                pooling=arguments.pooling,
                normalize=arguments.normalize,
                max_length=arguments.max_length,
                batch_tokens=arguments.batch_tokens,
            )
        )
        with progress("embed", arguments.quiet) as show:

            def report(now: "Embedded") -> None:
                last[:] = [now]
                if show is not None:
                    show(now.bytes_read, now.bytes_total, _line(now))

            done = embed_files(
                embedder,
                arguments.files,
                arguments.output,
                format=arguments.format,
                field=arguments.field,
                errors=arguments.errors,
                resume=arguments.resume,
                report=report,
            )
    except (OSError, ValueError, ImportError) as error:
        kept = f"; {_kept(last[0])}" if last else ""
        print(printable(f"bert-fast embed: {error}{kept}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = _kept(last[0]) if last else "no texts were finished"
        print(printable(f"bert-fast embed: interrupted; {kept}"), file=sys.stderr)
        return 130
    print(printable(f"{arguments.output}: {done.texts:,} x {embedder.model.config.hidden_size}; {_line(done)}"))
    return 0


def _line(now: "Embedded") -> str:
    seconds = max(now.seconds, 1e-9)
    texts, tokens = now.texts - now.resumed_texts, now.tokens - now.resumed_tokens
    before = f" behind {now.resumed_texts:,}" if now.resumed_texts else ""
    return (
        f"{texts:,} texts{before} in {now.seconds:.1f} s, {texts / seconds:,.0f} texts and {tokens / seconds:,.0f} "
        "tokens a second"
    )


def _kept(now: "Embedded") -> str:
    return f"{now.texts:,} texts are kept, the same command with --resume goes on behind them"
