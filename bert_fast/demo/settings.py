"""How much the demo does, and what it lets pass."""

from dataclasses import dataclass, replace

__all__ = [
    "HIDDEN_STATES_TOLERANCE",
    "LOSS_TOLERANCE",
    "QUESTIONS",
    "RELOADED_LOGITS_TOLERANCE",
    "Settings",
]

# Absolute: fp32 MiniLM is within 3.3e-6 of fp64, so this leaves room for two orders of summation.
HIDDEN_STATES_TOLERANCE = 2e-5
# Relative: rounding differences of two fp32 trainings from one seed, amplified by AdamW's division.
LOSS_TOLERANCE = 1e-4
# Relative to the largest logit: the same weights in two implementations, as for the hidden states.
RELOADED_LOGITS_TOLERANCE = 2e-5

# What is sought hardly shares a word with the passages that answer.
QUESTIONS = (
    "How do I write an anonymous function?",
    "How is memory freed for objects nobody uses?",
    "What happens when I divide by zero?",
    "How do I make a class callable like a function?",
)


@dataclass(frozen=True)
class Settings:
    """Amounts; the defaults fill about two minutes on two cores.

    Args:
        seed: decides which passages meet in a batch, what is masked, the new head's weights and every dropout mask.
        questions: for the search.
        max_passages: of the text; None takes all.
        max_length: tokens of a passage, more are cut off; what the weights' publisher uses.
        tokenizer_rounds: timed passes over the whole text.
        inference_batch_size: passages in a batch.
        inference_batches: batches in a round.
        inference_rounds: timed rounds.
        steps: of training.
        train_batch_size: passages in a training step.
        peer_steps: the first so many steps (at least 2: the first warms up) are taken with Hugging Face's model too.
        learning_rate: of AdamW, reached after a tenth of the steps.
        search_tokens: token budget of a batch of the search.
        is_quick: too little for times that mean anything; said in the report.
    """

    seed: int = 0
    questions: tuple[str, ...] = QUESTIONS
    max_passages: int | None = None
    max_length: int = 256
    tokenizer_rounds: int = 7
    inference_batch_size: int = 32
    inference_batches: int = 3
    inference_rounds: int = 3
    steps: int = 30
    train_batch_size: int = 12
    peer_steps: int = 4
    learning_rate: float = 3e-4
    search_tokens: int = 4096
    is_quick: bool = False

    def smaller(self) -> "Settings":
        """The same with amounts that only show that it runs."""
        return replace(
            self,
            max_passages=96,
            tokenizer_rounds=2,
            inference_batch_size=8,
            inference_batches=1,
            inference_rounds=1,
            steps=min(self.steps, 3),
            train_batch_size=4,
            peer_steps=2,
            is_quick=True,
        )
