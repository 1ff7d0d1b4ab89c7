"""Mine hard negatives with sentence-transformers on a fused model: passages near a heading that are not its own."""

import material
from datasets import Dataset
from sentence_transformers import SentenceTransformer, util

import bert_fast

options = material.arguments(__doc__, steps=200)  # steps: number of pairs
headings, passages = zip(*material.pairs()[: options.steps], strict=True)
pairs = Dataset.from_dict({"query": headings, "positive": passages})
model = bert_fast.fuse(SentenceTransformer(material.model_folder(), device="cpu"))
mined = util.mine_hard_negatives(
    pairs,
    model,
    num_negatives=3,
    relative_margin=0.05,  # a negative scores at most 95 % of the positive's score
    output_format="n-tuple",
    verbose=False,
)
options.output.mkdir(parents=True, exist_ok=True)
mined.to_json(str(options.output / "mined.jsonl"))  # query, positive, negative_1, negative_2, negative_3
print(f"{len(mined)} of {len(pairs)} pairs have three negatives; the first of them:")
for column, text in mined[0].items():
    print(f"  {column:10}  {text[:80]}")
