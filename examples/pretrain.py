"""A small BERT from random weights on plain text: masked words, and whether a sentence follows another."""

import material

from bert_fast import BertConfig, BertForPreTraining, BertTokenizer
from bert_fast.training import Trainer, TrainingArguments, last_checkpoint
from bert_fast.training.tasks.pretraining import Pretraining, PretrainingArguments

options = material.arguments(__doc__, steps=150)
folder = options.output / "pretrain"
folder.mkdir(parents=True, exist_ok=True)
texts = material.texts()
for name, part in (("train.txt", texts[:-200]), ("valid.txt", texts[-200:])):
    # A line is a sentence, an empty line ends a document.
    documents = ("\n".join(text.replace("\n", " ").split(". ")) for text in part)
    (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")

tokenizer = BertTokenizer.from_pretrained(material.model_folder())
task = Pretraining(PretrainingArguments([str(folder / "train.txt")], max_seq_length=64), tokenizer)
train = task.read([str(folder / "train.txt")], seed=0)
valid = task.read([str(folder / "valid.txt")], seed=0)
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
    initializer_range=0.049,  # 0.02 * sqrt(768 / 128): as large beside its input as in BERT-base
)  # fmt: skip
arguments = TrainingArguments(
    str(folder / "run"), max_steps=options.steps, per_device_train_batch_tokens=1024, learning_rate=2e-3,
    warmup_steps=options.steps // 10, report_to="none", save_steps=50, save_total_limit=1,
)  # fmt: skip
trainer = Trainer(
    BertForPreTraining(config),
    arguments,
    train_dataset=train,
    eval_dataset=valid,
    processing_class=tokenizer,
    compute_metrics=lambda said: task.metrics(train, valid, said.predictions, said.label_ids),
    preprocess_logits_for_metrics=task.answers,
)
# The same call goes on where an interrupted run was.
trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
trainer.save_model()
found = trainer.evaluate()
print(f"finished after {trainer.state.global_step} steps: loss {found['eval_loss']:.2f} on other text")
print(f"transformers and this library open {arguments.output_dir}")
