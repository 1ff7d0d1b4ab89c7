"""The C++ core against Hugging Face `tokenizers`: a million fuzzed texts, every code point, all real texts.

The check runner writes the texts with the library's tokens to a file before these tests run; without it a small one is
made here, of the same grammar.
"""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import process_server

from . import fuzz_file
from .fuzz_file import Setting
from .native_core import SMALL_VOCAB, make_hugging_face, make_native, needs_native, read_corpus, read_vocab

pytestmark = needs_native

SIMD_LEVELS = ("portable", "avx2", "avx512", "neon")


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if fuzz_file.is_current(fuzz_file.FULL_FILE):
        return fuzz_file.FULL_FILE
    path = tmp_path_factory.mktemp("fuzz") / "some.bin"
    fuzz_file.write_file(path, num_texts=20_000)
    return path


def test_every_text(texts_file: Path) -> None:
    count, found = fuzz_file.check_file(texts_file)
    assert not found, "\n".join(found)
    everything = 1_000_000 if fuzz_file.DATA.is_dir() else 600_000  # real texts are half of it
    assert count >= (everything if texts_file == fuzz_file.FULL_FILE else 20_000)


def check_with(level: str, texts_file: str) -> None:
    """In a process of its own: the level is chosen once."""
    os.environ["BERT_FAST_SIMD"] = level
    count, found = fuzz_file.check_file(Path(texts_file), some=True)
    assert count > 0 and not found, "\n".join(found)


@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_every_simd_level(texts_file: Path, level: str, tmp_path: Path) -> None:
    """What a machine with fewer instructions runs gives the same."""
    done = process_server.run(check_with, level, str(texts_file), folder=tmp_path)
    if "BERT_FAST_SIMD: this machine runs" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


def test_a_difference_is_found_and_made_small(tmp_path: Path) -> None:
    """What the comparison says where ours is wrong: here it lower-cases and the library does not."""
    vocab, options = list(SMALL_VOCAB), {"lowercase": False, "strip_accents": False}
    texts = [b"a", "b é".encode(), "ab x1 _ 中中 aAb ab".encode(), b"a" * 200]
    path = tmp_path / "texts.bin"
    block_bytes = fuzz_file.make_block((Setting("cased", vocab, options), texts))
    path.write_bytes(fuzz_file.MAGIC + struct.pack("<I", 3) + b"key" + block_bytes)
    (block,) = fuzz_file.read_blocks(path)
    assert block.texts == texts and block.setting.vocab == vocab
    assert fuzz_file.find_difference(block) is None

    class Wrong(Setting):
        def make_library(self) -> Any:
            return make_hugging_face(vocab, **options)

    wrong = block._replace(setting=Wrong("wrong", vocab, options | {"lowercase": True}))
    explained = fuzz_file.find_difference(wrong)
    assert explained is not None and "text     'A'" in explained
    assert explained.splitlines()[-2:] == ["ours     ([3], [(0, 1)], [0])", "expected ([0], [(0, 1)], [0])"]


def test_offsets_lead_back_to_the_text(shared_data: Path) -> None:
    """A token's piece is in what its part of the text becomes; nothing but space is left between the parts."""
    vocab = read_vocab(shared_data, "bert-base-multilingual-cased")
    ours = make_native(vocab)
    texts = read_corpus(shared_data)[::40]
    ids, cu_seqlens, offsets, _ = ours.encode(texts, offsets=True)
    unknown = vocab.index("[UNK]")
    assert len(ids) > 30_000
    for k, text in enumerate(texts):
        tokens = slice(cu_seqlens[k], cu_seqlens[k + 1])
        last_start = last_stop = 0
        for token, (start, stop) in zip(ids[tokens].tolist(), offsets[tokens].tolist(), strict=True):
            assert last_start <= start < stop
            assert not ours.normalize(text[last_stop:start]).strip()
            assert token == unknown or vocab[token].removeprefix("##") in ours.normalize(text[start:stop])
            last_start, last_stop = start, stop
        assert not ours.normalize(text[last_stop:]).strip()


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_a_million_empty_texts() -> None:
    for texts in ([""] * 1_000_000, [b""] * 1_000_000, [" "] * 1_000_000):
        ids, cu_seqlens, offsets, word_ids = make_native(SMALL_VOCAB).encode(texts, offsets=True, word_ids=True)
        assert len(ids) == len(offsets) == len(word_ids) == 0
        assert len(cu_seqlens) == 1_000_001 and not cu_seqlens.any()


@pytest.mark.slow
def test_one_gigabyte(shared_data: Path) -> None:
    """One text of 2^30 bytes: all of its tokens, from any number of threads."""
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 8 << 30:
        pytest.skip("less than 8 GiB of memory is free")
    ours = make_native(read_vocab(shared_data, "bert-base-uncased"))
    block = ("\n".join(read_corpus(shared_data)).encode())[: (1 << 20) - 1].decode(errors="ignore").encode()
    block += b"\n" * ((1 << 20) - len(block))  # whitespace at its end: nothing reaches from one into the next
    one = ours.encode([block])[0]
    ids, cu_seqlens, _, _ = ours.encode([block * 1024])
    assert cu_seqlens.tolist() == [0, 1024 * len(one)]
    assert (ids.reshape(1024, len(one)) == one).all()
    assert np.array_equal(ids[-len(one) :], one)
