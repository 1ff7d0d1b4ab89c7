"""A training loop of one's own on batches without padding, with this library's model, tokenizer and optimizer."""

import time

import material
import torch

import bert_fast

options = material.arguments(__doc__, steps=20)
train, valid = material.examples()
torch.manual_seed(0)
folder = material.model_folder()
tokenizer = bert_fast.BertTokenizer.from_pretrained(folder)
model = bert_fast.BertForSequenceClassification.from_pretrained(folder, num_labels=2)
groups = bert_fast.optim.weight_decay_groups(model, 0.01)
optimizer = bert_fast.optim.AdamW(groups, lr=1e-4, max_grad_norm=1.0)


def features(examples: list[material.Example]) -> list[dict[str, object]]:
    """Lists of ids, each as long as its text."""
    return [{**tokenizer(e.text, truncation=True, max_length=64), "label": e.label} for e in examples]


loader = torch.utils.data.DataLoader(
    features(train), batch_size=16, shuffle=True, collate_fn=bert_fast.PackedCollator()
)  # fmt: skip
model.train()
tokens, began = 0, time.perf_counter()
for step, batch in enumerate(loader, start=1):  # batch["input_ids"] is [T]: the texts behind one another
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tokens += len(batch["input_ids"])
    if step % 10 == 0 or step == options.steps:
        print(
            f"step {step}: loss {loss.item():.3f}, {tokens / (time.perf_counter() - began):,.0f} tokens/s", flush=True
        )
    if step == options.steps:
        break

model.eval()
with torch.inference_mode():
    batch = bert_fast.PackedCollator()(features(valid))
    right = (model(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
print(f"accuracy {right:.2f} on {len(valid)} passages")
model.save_pretrained(options.output / "packed_loop")
