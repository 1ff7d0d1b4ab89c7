"""Texts to vectors over HTTP: requests that arrive together are encoded as one batch without padding.

uvicorn --app-dir examples --factory serve:app     then POST /embed {"texts": ["..."]}; needs fastapi, uvicorn
python examples/serve.py                           without a server: requests one by one, and all at once
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import material
import numpy as np
import torch

import bert_fast

Embed = Callable[[list[str]], np.ndarray]


class Packer:
    """Gathers requests while a batch is being encoded: they are the next one.

    So nobody waits for a clock, one request alone is encoded at once, and batches grow with the load. Whose texts are
    in the same batch changes no bit of anyone's vectors.
    """

    def __init__(self, embed: Embed, max_texts: int = 64) -> None:
        self.batches = 0
        self._embed, self._max_texts = embed, max_texts
        self._waiting: list[tuple[list[str], asyncio.Future[np.ndarray]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)  # the loop goes on taking requests meanwhile

    async def embed(self, texts: list[str]) -> np.ndarray:
        """The vectors of one request, [n, H]."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[np.ndarray] = loop.create_future()
        self._waiting.append((texts, future))
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return await future

    async def _work(self) -> None:
        await asyncio.sleep(0)  # all who are ready by now
        while self._waiting:
            requests = self._next()
            texts = [text for request, _ in requests for text in request]
            self.batches += 1
            try:
                vectors = await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, texts)
            except Exception as error:
                for _, future in requests:
                    if not future.done():  # whoever has gone away has cancelled it
                        future.set_exception(error)
                continue
            for request, future in requests:
                own, vectors = vectors[: len(request)], vectors[len(request) :]
                if not future.done():
                    future.set_result(own)
        self._worker = None

    def _next(self) -> list[tuple[list[str], asyncio.Future[np.ndarray]]]:
        """The requests of a batch: the first, and those behind it whose texts fit in."""
        count, texts = 0, 0
        for request, _ in self._waiting:
            texts += len(request)
            if count and texts > self._max_texts:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def embedder() -> Embed:
    """Returns a function from texts to MiniLM's vectors."""
    folder = material.model_folder()
    tokenizer = bert_fast.BertTokenizer.from_pretrained(folder)
    model = bert_fast.BertForTextEmbedding.from_pretrained(
        folder, text_embedding={"pooling": "mean", "normalize": True}
    ).eval()

    def embed(texts: list[str]) -> np.ndarray:
        with torch.inference_mode():
            return model(**tokenizer.pack(texts, max_length=256)).embeddings.numpy()

    return embed


def app() -> Any:
    """The application."""
    import fastapi
    import pydantic

    class Texts(pydantic.BaseModel):
        texts: list[str] = pydantic.Field(min_length=1, max_length=64)

    packer, application = Packer(embedder()), fastapi.FastAPI()

    @application.post("/embed")
    async def embed(request: Texts) -> dict[str, list[list[float]]]:
        return {"vectors": (await packer.embed(request.texts)).tolist()}

    return application


async def one_by_one(packer: Packer, texts: list[str]) -> list[np.ndarray]:
    """Each request when the one before it has been answered."""
    return [await packer.embed([text]) for text in texts]


async def at_once(packer: Packer, texts: list[str]) -> list[np.ndarray]:
    """All requests, none of which waits for another's answer."""
    return await asyncio.gather(*(packer.embed([text]) for text in texts))


def main() -> None:
    """Both, timed."""
    options = material.arguments(__doc__ or "", steps=200)  # steps: of requests
    texts = [text[:200] for text in material.texts()[: options.steps]]
    embed = embedder()
    embed(texts[:2])
    answers = []
    for arrive in (one_by_one, at_once):
        packer, begun = Packer(embed), time.perf_counter()
        answers.append(np.concatenate(asyncio.run(arrive(packer, texts))))
        rate = len(texts) / (time.perf_counter() - begun)
        print(f"{arrive.__name__}: {rate:,.0f} requests/s in {packer.batches} batches", flush=True)
    print(f"the same bits: {np.array_equal(*answers)}")
    options.output.mkdir(parents=True, exist_ok=True)
    np.save(options.output / "served.npy", answers[1])


if __name__ == "__main__":
    main()
