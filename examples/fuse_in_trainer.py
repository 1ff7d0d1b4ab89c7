"""A classifier of transformers, fused, under transformers' own Trainer. The only line that is new is marked."""

import material
import torch
import transformers

import bert_fast

options = material.arguments(__doc__, steps=20)
train, valid = material.examples()
folder = material.model_folder()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
bert_fast.fuse(model)  # <- the new line


def features(examples: list[material.Example]) -> list[dict[str, object]]:
    """What Trainer's collator pads."""
    tokens = tokenizer([example.text for example in examples], truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "label": example.label} for ids, example in zip(tokens, examples, strict=True)]


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    """Share of right answers."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


torch.manual_seed(0)
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments(
        str(options.output / "fuse_in_trainer"), max_steps=options.steps, per_device_train_batch_size=16,
        learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=10, save_strategy="no", report_to=[],
    ),
    train_dataset=features(train),
    eval_dataset=features(valid),
    data_collator=transformers.DataCollatorWithPadding(tokenizer),
    compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.2f} on {len(valid)} passages")
model.save_pretrained(options.output / "fuse_in_trainer" / "model")  # a checkpoint like any of transformers
