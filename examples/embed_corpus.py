"""Encode a corpus with sentence-transformers on a fused model, and search it by meaning."""

import time

import material
import numpy as np
from sentence_transformers import SentenceTransformer, util

import bert_fast

options = material.arguments(__doc__, steps=300)  # steps: number of passages
texts = [" ".join(text.split()) for text in material.texts()[: options.steps]]
model = bert_fast.fuse(SentenceTransformer(material.model_folder(), device="cpu"))

began = time.perf_counter()
vectors = model.encode(texts, convert_to_tensor=True)  # [number of passages, 384]
print(f"{len(texts)} passages, {len(texts) / (time.perf_counter() - began):,.0f} passages/s")
options.output.mkdir(parents=True, exist_ok=True)
np.save(options.output / "vectors.npy", vectors.numpy())

questions = ["how do I run code at the end, whatever happens?", "what is the difference between is and =="]
found = util.semantic_search(model.encode(questions, convert_to_tensor=True), vectors, top_k=3)
for question, hits in zip(questions, found, strict=True):
    print(f"\n{question}")
    for hit in hits:
        print(f"  {hit['score']:.2f}  {texts[hit['corpus_id']][:90]}")
