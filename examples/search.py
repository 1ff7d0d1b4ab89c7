"""Texts to vectors, and the nearest to a question: by meaning, not by words."""

import material

from bert_fast.training import recipes

options = material.arguments(__doc__, steps=400)  # steps: of texts that are embedded
options.output.mkdir(parents=True, exist_ok=True)
texts = [" ".join(text.split()) for text in material.texts()[: options.steps]]
source = options.output / "search.txt"
source.write_text("\n".join(texts) + "\n", encoding="utf-8")

embedder = recipes.Embedder.from_pretrained(material.model_folder(), pooling="mean", normalize=True)
recipes.embed_files(embedder, [str(source)], str(options.output / "search.npy"), resume=False)
index = recipes.Index(options.output / "search.npy")  # mapped, not read: it may be larger than memory
for question in ("how do I run code at the end, whatever happens?", "what is the difference between is and =="):
    scores, rows = recipes.search(index, embedder.embed([question]), top_k=3)
    print(f"\n{question}")
    for score, row in zip(scores[0], rows[0], strict=True):
        print(f"  {score:.2f}  {texts[row][:90]}")
