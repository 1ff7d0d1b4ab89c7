"""The benchmark of texts to vectors: what is compared does the same work, and figures of a case."""

import pytest
import torch

from benchmarks.sentence_encoding import corpora, load, measure, packed_batches
from bert_fast.testing.tolerances import ABSOLUTE

pytest.importorskip("sentence_transformers")


@pytest.mark.slow
def test_contestants_make_the_same_vectors(shared_data, minilm_dir) -> None:
    untouched, fused = load()
    texts = [text for of_case in corpora().values() for text in of_case[:9]]
    wanted = untouched.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(
        fused.encode(texts, convert_to_tensor=True), wanted, rtol=0, atol=ABSOLUTE["sentence_embeddings"]
    )
    ordered = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    with torch.no_grad():
        alone = torch.cat([fused(batch)["sentence_embedding"] for batch in packed_batches(fused, texts)])
    torch.testing.assert_close(alone, wanted[ordered], rtol=0, atol=ABSOLUTE["sentence_embeddings"])
    found = measure(untouched, fused, texts[:5], rounds=2)
    assert set(found["entrants"]) == {"sentence-transformers", "bert_fast", "model alone"}
    assert found["texts"] == 5 and found["tokens"] > 10 and min(found["over_theirs"], found["of_model"]) > 0
