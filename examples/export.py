"""A model as a program of torch.export, for batches of any size and length; with --compile also by AOTInductor.

The program calls bert_fast's ops: whoever loads it imports bert_fast first. Compiling needs a C++ compiler and half a
minute.
"""

import time
from collections.abc import Callable

import material
import torch
from torch import Tensor

import bert_fast

Call = Callable[[Tensor, Tensor], Tensor]


class Vectors(torch.nn.Module):
    """Ids and mask [B, S] to a vector a text, [B, H]: what is exported has tensors for arguments and results."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        how = {"pooling": "mean", "normalize": True}
        self.model = bert_fast.BertForTextEmbedding.from_pretrained(folder, text_embedding=how)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """As above."""
        vectors: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).embeddings
        return vectors


def main() -> None:
    """Exports, loads what was saved, and shows what each way costs."""
    flags = {"--compile": "compile the program by AOTInductor, too"}
    options = material.arguments(__doc__ or "", steps=8, flags=flags)  # steps: of batches that are timed
    folder, output = material.model_folder(), options.output / "export"
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = bert_fast.BertTokenizer.from_pretrained(folder)
    texts = material.texts()
    batches = []
    for step in range(options.steps):
        some = texts[step * 8 : step * 8 + 8 - step % 2]  # of 8 and 7 texts
        inputs = tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt")
        batches.append((inputs["input_ids"], inputs["attention_mask"]))
    model = Vectors(folder).eval()

    with torch.no_grad():
        begun = time.perf_counter()
        any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        program = torch.export.export(model, batches[0], dynamic_shapes=(any_size, any_size))
        torch.export.save(program, output / "program.pt2")
        ways: dict[str, Call] = {"as it is": model, "exported": torch.export.load(output / "program.pt2").module()}
        print(f"exported, saved and loaded in {time.perf_counter() - begun:.1f} s")
        if options.compile:
            begun = time.perf_counter()
            package = str(output / "compiled.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=package)
            ways["compiled"] = torch._inductor.aoti_load_package(package)
            print(f"compiled and loaded in {time.perf_counter() - begun:.1f} s")
        for name, way in ways.items():
            way(*batches[0])
            begun = time.perf_counter()
            made = [way(*batch) for batch in batches]
            seconds = time.perf_counter() - begun
            error = max(float((one - model(*batch)).abs().max()) for one, batch in zip(made, batches, strict=True))
            print(f"{name}: {seconds / len(batches) * 1e3:.1f} ms a batch, within {error:.0e}", flush=True)


if __name__ == "__main__":
    main()
