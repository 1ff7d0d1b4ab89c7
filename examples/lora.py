"""LoRA by PEFT on a fused model: the adapters learn, the weights below them stay."""

import material
import peft
import torch
import transformers

import bert_fast

options = material.arguments(__doc__, steps=60)
train, valid = material.examples()
torch.manual_seed(0)
folder = material.model_folder()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
adapters = peft.LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
model = peft.get_peft_model(bert_fast.fuse(model), adapters)  # fusing afterwards is the same
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def batch_of(examples: list[material.Example]) -> dict[str, torch.Tensor]:
    """A padded batch; the fused model takes padding out by itself."""
    words = [example.text for example in examples]
    batch = tokenizer(words, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return {**batch, "labels": torch.tensor([example.label for example in examples])}


model.train()
for step in range(1, options.steps + 1):
    start = 16 * (step - 1) % (len(train) - 16)
    loss = model(**batch_of(train[start : start + 16])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

model.eval()
with torch.inference_mode():
    batch = batch_of(valid)
    right = (model(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
print(f"accuracy {right:.2f} on {len(valid)} passages")
model.save_pretrained(options.output / "lora")  # the adapters alone, as PEFT writes them
