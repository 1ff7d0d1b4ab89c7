"""Results as the steps would return them, without any work."""

import pytest

from bert_fast.demo.checkpoint import CheckpointResult
from bert_fast.demo.environment import Environment
from bert_fast.demo.inference import InferenceResult
from bert_fast.demo.results import DemoResults
from bert_fast.demo.search import Answer, Hit, SearchResult
from bert_fast.demo.settings import Settings
from bert_fast.demo.text import Passage
from bert_fast.demo.timing import Timing
from bert_fast.demo.tokenizing import TokenizerResult
from bert_fast.demo.training import SavedBytes, TrainingResult

HOSTILE = "<script>alert('x')</script> & [red]markup[/red] \"quoted\""


@pytest.fixture
def demo_results() -> DemoResults:
    """Every check passes; text from outside is hostile to HTML and to terminal markup."""
    fast, slow = Timing((1000, 1000), (0.5, 0.25)), Timing((1000, 1000), (2.0, 1.0))
    versions = {"bert_fast": "0", "Python": "3", "torch": "2", "transformers": "5", "tokenizers": "0"}
    hits = tuple(Hit(Passage(HOSTILE, f"{HOSTILE} {index}"), 0.5) for index in range(3))
    return DemoResults(
        settings=Settings(steps=3, questions=(HOSTILE,)),
        environment=Environment(
            "now", f"CPU {HOSTILE}", 2, versions, "used", {"attention": "torch", "dropout": "torch"}
        ),
        tokenizer=TokenizerResult("C++", 3, 300, (10, 20, 300), 3, 330, 330, None, fast, slow),
        inference=InferenceResult(2, 1, 300, 600, 1e-6, 2e-6, padded=fast, packed=fast, theirs=slow),
        training=TrainingResult(
            batch_size=2,
            fill=0.5,
            dropout_p=0.1,
            learning_rate=1e-4,
            losses=(10.0, 9.0, 8.0),
            reference_losses=(10.0, 9.00001, 8.0),
            ours=fast,
            reference=slow,
            theirs=slow,
            encoder_bytes=SavedBytes(10**6, 4 * 10**6),
            model_bytes=SavedBytes(10**6, 5 * 10**6),
        ),
        search=SearchResult(3, 330, 1.0, (Answer(HOSTILE, hits),)),
        checkpoint=CheckpointResult(("config.json",), 100, "BertForMaskedLM, BertTokenizer", True, 1e-6),
        seconds=12.0,
    )
