"""Question answering on real texts, padded windows: a fused BertForQuestionAnswering beside transformers' own.

Two layers of MiniLM learn from XQuAD. The loss that is compared is transformers' with padding left out of the softmax,
as the fused model leaves it out: what transformers itself minimises counts the scores of padding's hidden states, which
a model that removes padding does not have.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bert_fast
from bert_fast.testing.tolerances import RELATIVE

transformers = pytest.importorskip("transformers")

STEPS, BATCH_SIZE, LENGTH, HELD_OUT = 12, 4, 128, 16


def _windows(data: Path, tokenizer: bert_fast.BertTokenizer, count: int) -> dict[str, Tensor]:
    """Questions with their contexts, all padded to one length."""
    windows: list[dict[str, list[int] | int]] = []
    articles = json.loads((data / "question_answering" / "xquad.en.json").read_text())["data"]
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        for asked in paragraph["qas"][:2]:
            answer, context = asked["answers"][0], paragraph["context"]
            window = tokenizer(
                asked["question"], context, truncation="only_second", max_length=LENGTH, padding="max_length",
                return_offsets_mapping=True,
            )  # fmt: skip
            start, stop = answer["answer_start"], answer["answer_start"] + len(answer["text"])
            places = [
                place
                for place, (begin, end) in enumerate(window.pop("offset_mapping"))
                if window["token_type_ids"][place] and begin < stop and end > start
            ]
            if places and len(windows) < count:
                windows.append({**window, "start_positions": places[0], "end_positions": places[-1]})
    return {name: torch.tensor([window[name] for window in windows]) for name in windows[0]}


def _loss(model: Any, batch: dict[str, Tensor], is_fused: bool) -> Tensor:
    output = model(**batch)
    if is_fused:
        return output.loss
    padding = batch["attention_mask"] == 0
    starts, ends = (s.masked_fill(padding, -torch.inf) for s in (output.start_logits, output.end_logits))
    return (F.cross_entropy(starts, batch["start_positions"]) + F.cross_entropy(ends, batch["end_positions"])) / 2


def _spans(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The best pair of positions of every window, [N, 2], among all columns, padding's too."""
    with torch.no_grad():
        output = model.eval()(**{name: value for name, value in batch.items() if "position" not in name})
    starts, ends = (scores.softmax(1) for scores in (output.start_logits, output.end_logits))
    best = (starts[:, :, None] * ends[:, None, :]).triu().flatten(1).argmax(1)
    return torch.stack((best // LENGTH, best % LENGTH), dim=1)


@pytest.mark.slow
def test_fused_learns_as_untouched(minilm_dir: Path, shared_data: Path) -> None:
    transformers.utils.logging.set_verbosity_error()  # layers that are left out, a head that is new
    torch.manual_seed(0)  # of the head
    untouched = transformers.BertForQuestionAnswering.from_pretrained(
        minilm_dir, num_hidden_layers=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    untouched.bert.embeddings.requires_grad_(False)
    windows = _windows(shared_data, bert_fast.BertTokenizer.from_pretrained(minilm_dir), STEPS * BATCH_SIZE + HELD_OUT)
    batches = [{name: value[step::STEPS][:BATCH_SIZE] for name, value in windows.items()} for step in range(STEPS)]
    held_out = {name: value[-HELD_OUT:] for name, value in windows.items()}
    models = {True: bert_fast.fuse(copy.deepcopy(untouched)), False: untouched}
    losses: dict[bool, list[float]] = {True: [], False: []}
    for is_fused, model in models.items():
        optimizer = torch.optim.AdamW((p for p in model.train().parameters() if p.requires_grad), lr=5e-4)
        for batch in batches:
            loss = _loss(model, batch, is_fused)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[is_fused].append(loss.item())
    mine, theirs = torch.tensor(losses[True]), torch.tensor(losses[False])
    assert theirs[-5:].mean() < theirs[:5].mean(), "nothing was learnt: an empty comparison"
    assert (mine - theirs).abs().max() <= RELATIVE["fine_tuning_loss_100_steps"] * theirs.max()
    mine, theirs = (_spans(model, held_out) for model in models.values())
    is_token = torch.stack((mine, theirs)) < held_out["attention_mask"].sum(1, keepdim=True)
    assert is_token[0].all(), "an answer that is padding"
    # The untouched model may name padding; where it does not, both give the same answer.
    assert ((mine == theirs) | ~is_token[1]).all(1).sum() >= HELD_OUT - 1
