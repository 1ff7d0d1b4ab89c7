"""A small BERT from random weights on plain text: masked words, and whether a sentence follows another."""

import material

from bert_fast.training import recipes

options = material.arguments(__doc__, steps=150)
folder = options.output / "pretrain"
folder.mkdir(parents=True, exist_ok=True)
texts = material.texts()
for name, part in (("train.txt", texts[:-200]), ("valid.txt", texts[-200:])):
    # A line is a sentence, an empty line ends a document.
    documents = ("\n".join(text.replace("\n", " ").split(". ")) for text in part)
    (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")

settings = recipes.Settings.load(
    "pretrain",
    None,
    {
        "model": "tiny",  # 2 layers, hidden size 128
        "tokenizer": material.model_folder(),
        "train": [str(folder / "train.txt")],
        "valid": [str(folder / "valid.txt")],
        "output_dir": folder / "run",
        "steps": options.steps,
        "batch_tokens": 1024,
        "learning_rate": 2e-3,
        "max_length": 64,
    },
)
result = recipes.run(settings, resume="auto")  # the same call goes on where an interrupted run was
print(f"{result.outcome} after {result.step} steps; transformers and this library open {result.model_dir}")
