"""The main job end to end, on real text and real weights; each claim is checked beside another library as it is made.

    python examples/demo.py              about two minutes on two cores; downloads nothing
    python examples/demo.py --quick      a fraction of the work, to see that it runs

Five steps, a function each: tokenize Python's language reference, encode it with MiniLM, train MiniLM on it, search it
by meaning, save the trained model and open it with transformers. What they find is printed, and stands in report.html
in the folder of --output, beside the trained model. The exit status is 1 if a check fails.
"""

import argparse
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from findings import Findings, in_turn
from material import Passage, python_reference, weights_folder
from torch import Tensor, nn

import bert_fast
from bert_fast.bench.measuring import Timing, timed
from bert_fast.reference.heads import ReferenceBertForMaskedLM

try:
    import tokenizers
    import transformers
    from sentence_transformers import SentenceTransformer, util
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"demo: {missing}: pip install 'bert_fast[demo]' installs what the demo compares with")

# Absolute: fp32 MiniLM is within 3.3e-6 of fp64, so this leaves room for two orders of summation.
HIDDEN_STATES_TOLERANCE = 2e-5
# Relative: rounding differences of two fp32 trainings from one seed, amplified by AdamW's division.
LOSS_TOLERANCE = 1e-4
# Relative to the largest logit: the same weights in two implementations, as for the hidden states.
RELOADED_LOGITS_TOLERANCE = 2e-5

MAX_LENGTH = 256  # tokens of a passage, more are cut off; what the publisher of the weights uses
# What is sought hardly shares a word with the passages that answer.
QUESTIONS = (
    "How do I write an anonymous function?",
    "How is the memory of unused objects freed?",
    "What happens when I divide by zero?",
    "How do I make a class callable like a function?",
)


@dataclass(frozen=True)
class Work:
    """What the steps work on, and how much they do.

    peer_steps: transformers takes part in the first training steps only, because it is slow.
    """

    folder: Path  # weights and vocabulary
    tokenizer: bert_fast.BertTokenizer
    passages: Sequence[Passage]
    device: torch.device
    seed: int = 0
    steps: int = 30
    tokenizer_rounds: int = 7
    encode_rounds: int = 3
    encode_batches: int = 3
    encode_batch_size: int = 32
    train_batch_size: int = 12
    peer_steps: int = 4

    @property
    def texts(self) -> list[str]:
        """The passages without their headings."""
        return [passage.text for passage in self.passages]


QUICK: dict[str, int] = dict(
    tokenizer_rounds=2, encode_rounds=1, encode_batches=1, encode_batch_size=8, train_batch_size=4, peer_steps=2
)
QUICK_PASSAGES, QUICK_STEPS = 96, 3


def tokenize(work: Work, found: Findings) -> None:
    """Step 1: the whole text through the C++ tokenizer and through Hugging Face tokenizers."""
    texts = work.texts
    peer = tokenizers.Tokenizer.from_file(str(work.folder / "tokenizer.json"))
    peer.no_truncation()
    peer.no_padding()

    def ours() -> list[list[int]]:
        return work.tokenizer(texts, truncation=False, verbose=False)["input_ids"]

    def theirs() -> list[list[int]]:
        return [encoding.ids for encoding in peer.encode_batch_fast(texts)]  # the fast one tracks no offsets

    pairs = list(zip(ours(), theirs(), strict=True))
    total = sum(max(len(a), len(b)) for a, b in pairs)
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    different = [text for text, (a, b) in zip(texts, pairs, strict=True) if a != b]
    count = f"{equal:,} of {total:,}" + (f"; first difference in {different[0][:40]!r}" if different else "")
    found.check("Token ids equal to those of tokenizers", count, "all", not different)
    times = in_turn((ours, theirs), total, work.tokenizer_rounds, torch.device("cpu"))
    found.speed("tokenize", times[0], "tokenizers", times[1])


def encode(work: Work, model: bert_fast.BertModel, found: Findings) -> None:
    """Step 2: the same batches through both models: padded to their longest passage and, through ours, also packed."""
    peer = transformers.BertModel.from_pretrained(work.folder, attn_implementation="sdpa").eval().to(work.device)
    size = work.encode_batch_size
    drawn = random.sample(work.texts, min(len(work.texts), size * work.encode_batches))
    groups = [drawn[start : start + size] for start in range(0, len(drawn), size)]
    padded = [padded_batch(work.tokenizer, group).to(work.device) for group in groups]
    packed = [work.tokenizer.pack(group, max_length=MAX_LENGTH).to(work.device) for group in groups]
    keep = torch.cat([batch["attention_mask"].flatten() for batch in padded]).bool()  # the real tokens

    def states(encoder: nn.Module, batches: Sequence[Any]) -> Tensor:  # [positions of all batches, hidden size]
        return torch.cat([encoder(**batch).last_hidden_state.flatten(0, -2) for batch in batches])

    contestants = [lambda: states(model, padded), lambda: states(model, packed), lambda: states(peer, padded)]
    with torch.inference_mode():
        of_padded, of_packed, of_peer = (run() for run in contestants)
        for kind, ours in (("padded", of_padded[keep]), ("packed", of_packed)):
            distance = (ours - of_peer[keep]).abs().max().item()
            name = f"Hidden states, {kind}: distance to transformers"
            found.check_at_most(name, distance, HIDDEN_STATES_TOLERANCE)
        times = in_turn(contestants, int(keep.sum()), work.encode_rounds, work.device)
    print(f"  {keep.float().mean():.0%} of the positions of the padded batches hold a token")
    found.speed("encode, padded batch", times[0], "transformers, SDPA", times[2])
    found.speed("encode, packed batch", times[1], "transformers, SDPA, padded", times[2])


def train(work: Work, found: Findings) -> bert_fast.BertForMaskedLM:
    """Step 3: masked-LM training from the real weights, dropout on, beside the textbook reference.

    Both start from the same weights and get the same batches and dropout seeds, so they draw the same dropout masks and
    must follow the same curve. transformers draws other masks: only its speed and memory compare.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left at their initial values")  # the head, which MiniLM lacks
        model = bert_fast.BertForMaskedLM.from_pretrained(work.folder).to(work.device)
    reference = ReferenceBertForMaskedLM(model.config).to(work.device)
    reference.load_state_dict(model.state_dict())
    peer = transformers.BertForMaskedLM.from_pretrained(work.folder, attn_implementation="sdpa").to(work.device)
    ours, textbook, theirs = Learner(model), Learner(reference), Learner(peer)

    tokens, kept = [], [0, 0]
    batches = tqdm(masked_batches(work), "training", work.steps, leave=False, disable=None)
    for step, batch in enumerate(batches):
        labels = batch.pop("labels")
        tokens.append(int(batch["attention_mask"].sum()))
        if step == 0:
            kept = [kept_for_backward(one, batch | {"labels": labels}) for one in (model, peer)]
        # Any number will do, as long as both get the same.
        dropout_seed = torch.tensor([work.seed * 1_000_003 + step], device=work.device)
        ours.step(**batch, labels=labels, dropout_seed=dropout_seed)
        # Like ours, the reference runs its head on the labelled rows only: all rows take too long.
        rows = (labels.flatten() != -100).nonzero().squeeze(1)
        labelled = labels.flatten()[rows]
        textbook.step(**batch, labels=labelled, masked_lm_positions=rows, dropout_seed=dropout_seed)
        if step < work.peer_steps:
            theirs.step(**batch, labels=labels)

    print(f"  loss {ours.losses[0]:.2f} -> {ours.losses[-1]:.2f} in {work.steps} steps (the head starts untrained)")
    curves = torch.tensor([ours.losses, textbook.losses], dtype=torch.float64)
    distance = ((curves[0] - curves[1]).abs() / curves[1]).max().item()
    found.check_at_most("Training losses: relative distance to the reference", distance, LOSS_TOLERANCE)
    found.speed("training step", ours.timing(tokens), "transformers, SDPA", theirs.timing(tokens))
    found.speed("training step", ours.timing(tokens), "reference", textbook.timing(tokens))
    found.memory("kept for backward", kept[0], "transformers, SDPA", kept[1])
    shown = range(0, work.steps, max(1, work.steps // 6))
    lines = [(str(step + 1), f"{ours.losses[step]:.5f}", f"{textbook.losses[step]:.5f}") for step in shown]
    found.section("Training beside the reference", ("step", "loss", "loss of the reference"), lines)
    return model.eval()


class Learner:
    """A model with AdamW and a short warm-up of the learning rate; remembers losses and seconds of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=1 / 3, total_iters=2)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, **inputs: Tensor) -> None:
        """Forward, backward, AdamW."""

        def run() -> None:
            loss = self.model(**inputs).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

        self.seconds.append(timed(run, inputs["input_ids"].device))

    def timing(self, tokens: Sequence[int]) -> Timing:
        """Of its steps without the first, which warms up, where there are others."""
        start = min(1, len(self.seconds) - 1)
        return Timing(tuple(tokens[start : len(self.seconds)]), tuple(self.seconds[start:]))


def search(work: Work, found: Findings) -> None:
    """Step 4: the nearest passages to a question, by a fused SentenceTransformer with the original weights."""
    model = bert_fast.fuse(SentenceTransformer(str(work.folder), device=str(work.device)))
    model.max_seq_length = MAX_LENGTH
    start = time.perf_counter()
    texts = [f"{passage.heading}. {passage.text}" for passage in work.passages]
    vectors = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    print(f"  {len(texts):,} passages to vectors in {time.perf_counter() - start:.1f} s")
    asked = model.encode(list(QUESTIONS), convert_to_tensor=True, show_progress_bar=False)
    rows = []
    for question, hits in zip(QUESTIONS, util.semantic_search(asked, vectors, top_k=3), strict=True):
        print(f"  {question}")
        for hit in hits:
            passage, score = work.passages[hit["corpus_id"]], f"{hit['score']:.2f}"
            print(f"    {score}  {passage.heading}: {' '.join(passage.text.split())[:80]} ...")
            rows.append((question, score, passage.heading, passage.text))
    found.section("Search by meaning", ("question", "cosine", "heading", "passage"), rows)


def save_and_reopen(work: Work, model: bert_fast.BertForMaskedLM, folder: Path, found: Findings) -> None:
    """Step 5: the trained model as a folder that transformers opens, with the same ids and logits."""
    model.save_pretrained(folder)
    work.tokenizer.save_pretrained(folder)
    ours = padded_batch(work.tokenizer, work.texts[:8]).to(work.device)
    ids, distance = "different", float("nan")
    try:
        peer = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval().to(work.device)
        theirs = padded_batch(transformers.AutoTokenizer.from_pretrained(folder), work.texts[:8]).to(work.device)
    except Exception as error:  # whatever transformers raises: both checks fail, the report is still written
        ids = f"cannot be opened: {type(error).__name__}: {error}"
    else:
        ids = "equal" if torch.equal(ours["input_ids"], theirs["input_ids"]) else "different"
        keep = ours["attention_mask"].bool()
        with torch.inference_mode():
            expected = peer(**ours).logits[keep]
            distance = ((model(**ours).logits[keep] - expected).abs().max() / expected.abs().max()).item()
    found.check("Checkpoint in transformers: token ids", ids, "equal", ids == "equal")
    name = "Checkpoint in transformers: logits, relative distance"
    found.check_at_most(name, distance, RELOADED_LOGITS_TOLERANCE)


def padded_batch(tokenizer: Any, texts: list[str]) -> Any:
    """A batch as transformers has it, by either library's tokenizer."""
    return tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")


def masked_batches(work: Work) -> Iterator[dict[str, Tensor]]:
    """Random passages; 15 % of their tokens are to be predicted, as transformers' collator chooses and hides them."""
    collator = transformers.DataCollatorForLanguageModeling(work.tokenizer, mlm_probability=0.15, seed=work.seed)
    for _ in range(work.steps):
        drawn = random.sample(work.texts, min(len(work.texts), work.train_batch_size))
        batch = collator([dict(work.tokenizer(text, truncation=True, max_length=MAX_LENGTH)) for text in drawn])
        yield {name: tensor.to(work.device) for name, tensor in batch.items()}


def kept_for_backward(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes that autograd holds on to after a forward pass: distinct storages, without the parameters."""
    kept: dict[int, Tensor] = {}  # by address; the tensors stay alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the five steps; returns 1 if a check failed or the output cannot be written, else 0."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder; default: %(default)s")
    parser.add_argument("--steps", type=positive, default=Work.steps, help="of training; default: %(default)s")
    parser.add_argument("--seed", type=natural, default=Work.seed, help="of all that is drawn; default: %(default)s")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, cuda:1; default: cuda where it is")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work; times mean nothing")
    options = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # passages hold any character, a terminal may not
    try:
        return run(options)
    except (OSError, bert_fast.CheckpointError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """The steps in order."""
    options.output.mkdir(parents=True, exist_ok=True)  # what cannot be written is said before minutes are spent
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    folder, passages = weights_folder(), python_reference()
    tokenizer = bert_fast.BertTokenizer.from_pretrained(folder)
    work = Work(folder, tokenizer, passages, options.device, options.seed, options.steps)
    if options.quick:
        few = random.sample(passages, QUICK_PASSAGES)
        work = Work(folder, tokenizer, few, options.device, options.seed, min(options.steps, QUICK_STEPS), **QUICK)
    found = Findings(options.device, options.quick)

    print(f"1. Tokenize: {len(work.passages):,} passages of Python's language reference")
    tokenize(work, found)
    print("\n2. Encode with the real weights of MiniLM")
    encode(work, bert_fast.BertModel.from_pretrained(folder, device=work.device), found)
    print("\n3. Train: masked LM, dropout on, beside the reference")
    model = train(work, found)
    print("\n4. Search by meaning")
    search(work, found)
    print("\n5. Save, and open with transformers")
    save_and_reopen(work, model, options.output / "checkpoint", found)
    found.finish(options.output / "report.html")
    return 1 if found.failed else 0


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if (value := natural(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return value


def natural(text: str) -> int:
    """A whole number that all libraries take as a seed."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32 - 1, got {text}")
    return int(text)


def device(name: str) -> torch.device:
    """A device that can be used; "auto" is cuda where it is there, else cpu."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used: {str(error).splitlines()[0]}") from None


if __name__ == "__main__":
    sys.exit(main())
