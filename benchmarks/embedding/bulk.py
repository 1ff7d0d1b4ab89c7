"""Raw text to vectors on a CPU: our bulk path beside the model alone and beside sentence-transformers.

MiniLM's published weights in fp32, real texts, CPU time of the process in so many threads:

    model                  our encoder's forward pass on ids that are packed already, in the bulk path's own batches
    bert_fast              `embed_files`: from a text file to an .npy file, tokenizing, batching, pooling, writing
    sentence_transformers  `SentenceTransformer.encode` of the same texts as a list, with its defaults

They take turns; each turn has all texts. Their vectors must agree before anything is timed.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import DATA
from benchmarks.recipes.data import minilm
from benchmarks.tokenizers.corpora import CORPORA
from bert_fast.tokenization import RaggedBatch
from bert_fast.training.recipes import Embedder, embed_files
from bert_fast.training.recipes.embedding import batches_by_length

SENTENCES, PASSAGES = 256, 64  # some 10,000 tokens each


def texts_of(name: str) -> list[str]:
    """Sentences of books ("sentences", 100 to 300 bytes), or XQuAD's paragraphs ("passages"), each without line ends.

    OSError where they are not there.
    """
    if name == "sentences":
        return CORPORA["en_short"].read()[:SENTENCES]
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph["context"] for article in squad["data"] for paragraph in article["paragraphs"]]
    return [" ".join(paragraph.split()) for paragraph in paragraphs[:PASSAGES]]


def run_bulk(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Times one kind of texts; rates in real tokens a second, medians."""
    from sentence_transformers import SentenceTransformer

    texts = texts_of(name)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        embedder = Embedder.from_pretrained(minilm())
        theirs = SentenceTransformer(str(minilm()), device="cpu")
        ragged = embedder.tokenize(texts)
        with tempfile.TemporaryDirectory() as folder:
            path, output = Path(folder) / "texts.txt", Path(folder) / "out.npy"
            path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            contestants: dict[str, Callable[[], object]] = {
                "model": model_alone(embedder, ragged),
                "bert_fast": lambda: embed_files(embedder, [path], output),
                "sentence_transformers": lambda: theirs.encode(texts, show_progress_bar=False),
            }
            contestants["bert_fast"]()
            expected = theirs.encode(texts, show_progress_bar=False)
            if not np.allclose(np.load(output), expected, rtol=0, atol=1e-5):
                raise RuntimeError(f"embed/{name}: vectors differ from sentence-transformers': nothing to time")
            times = interleaved(contestants, rounds, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    tokens = len(ragged.ids)
    ours = times["bert_fast"]
    return {
        "case": f"embed/minilm/{name}/{threads}",
        "texts": len(texts),
        "real_tokens": tokens,
        **{f"{one}_tokens_per_s": round(tokens / taken.median, 1) for one, taken in times.items()},
        "share_of_model": round(ours.speedup_over(times["model"]), 3),
        "ratio": round(ours.speedup_over(times["sentence_transformers"]), 3),
        **{f"{one}_cpu_s": [round(s, 4) for s in taken.seconds] for one, taken in times.items()},
    }


def model_alone(embedder: Embedder, ragged: RaggedBatch) -> Callable[[], None]:
    """The forward pass of all texts, to the last hidden states; ids, boundaries and lengths are made beforehand."""
    starts, lengths = ragged.cu_seqlens[:-1], np.diff(ragged.cu_seqlens)
    batches = []
    for rows in batches_by_length(lengths, embedder.batch_tokens):
        pieces = [ragged.ids[starts[row] : starts[row] + lengths[row]] for row in rows]
        batches.append(
            {
                "input_ids": torch.from_numpy(np.concatenate(pieces)),
                "cu_seqlens": torch.from_numpy(np.cumsum([0, *lengths[rows]]).astype(np.int32)),
                "max_seqlen": int(lengths[rows].max()),
            }
        )

    def run() -> None:
        with torch.inference_mode():
            for batch in batches:
                embedder.model(**batch)

    return run
