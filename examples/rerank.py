"""Train a fused CrossEncoder with sentence-transformers, and put passages in order for a heading."""

import random

import material
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

import bert_fast

options = material.arguments(__doc__, steps=30)
pairs = [(heading, " ".join(passage.split())) for heading, passage in material.pairs()]
train, valid = pairs[10:], pairs[:10]
random.seed(0)
torch.manual_seed(0)
rows = [(heading, passage, 1.0) for heading, passage in train]
rows += [(heading, random.choice(train)[1], 0.0) for heading, _ in train]
dataset = Dataset.from_dict(dict(zip(("query", "document", "label"), zip(*rows, strict=True), strict=True)))

model = bert_fast.fuse(CrossEncoder(material.model_folder(), num_labels=1, max_length=64, device="cpu"))
arguments = CrossEncoderTrainingArguments(
    str(options.output / "rerank"), max_steps=options.steps, per_device_train_batch_size=16, learning_rate=2e-4,
    logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
)  # fmt: skip
CrossEncoderTrainer(model=model, args=arguments, train_dataset=dataset, loss=BinaryCrossEntropyLoss(model)).train()

passages = [passage for _, passage in valid]
firsts = [model.rank(heading, passages)[0]["corpus_id"] for heading, _ in valid]
right = sum(first == place for place, first in enumerate(firsts))
print(f"of {len(valid)} headings, {right} have their own passage first")
model.save_pretrained(str(options.output / "rerank" / "model"))
