"""A file of texts to a file of vectors by a DataLoader of PyTorch: a process reads and tokenizes, this one computes."""

import time

import material
import numpy as np
import torch

import bert_fast

BATCH_SIZE = 64


class Lines(torch.utils.data.Dataset[str]):
    """The lines of a text file."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            self._lines = [line.rstrip("\n") for line in file]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        return self._lines[index]


class Pack:
    """Texts to a batch without padding; of a class at the top, so that another process can be given it."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = bert_fast.BertTokenizer.from_pretrained(folder)

    def __call__(self, texts: list[str]) -> dict[str, torch.Tensor | int]:
        """What the model takes."""
        return dict(self._tokenizer.pack(texts, max_length=256))


def main() -> None:
    """As many texts as `--steps` says."""
    options = material.arguments(__doc__ or "", steps=400)
    options.output.mkdir(parents=True, exist_ok=True)
    source, target = options.output / "texts.txt", options.output / "vectors.npy"
    texts = [" ".join(text.split()) for text in material.texts()[: options.steps]]
    source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    lines = Lines(str(source))
    model = bert_fast.BertForTextEmbedding.from_pretrained(
        material.model_folder(), text_embedding={"pooling": "mean"}
    ).eval()
    loader = torch.utils.data.DataLoader(
        lines, batch_size=BATCH_SIZE, num_workers=1, collate_fn=Pack(material.model_folder())
    )  # no sorting: nothing is padded, and the neighbours in a batch change no bit of a vector
    shape = len(lines), model.config.hidden_size
    vectors = np.lib.format.open_memmap(target, mode="w+", dtype=np.float32, shape=shape)
    done, tokens, begun = 0, 0, time.perf_counter()
    with torch.inference_mode():
        for batch in loader:
            made = model(**batch).embeddings
            vectors[done : done + len(made)] = made.numpy()
            done, tokens = done + len(made), tokens + len(batch["input_ids"])
    vectors.flush()
    seconds = time.perf_counter() - begun
    print(f"{done} texts, {done / seconds:,.0f} texts/s, {tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main()
