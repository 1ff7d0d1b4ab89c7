// A batch of texts on several threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wordpiece/text_tokenizer.h"
#include "wordpiece/units.h"

namespace bert_fast::wordpiece {

struct Batch {
  Tokens tokens;                    // of all texts, in order
  Buffer<std::int64_t> wide_ids;    // in place of tokens.ids, where asked for
  Buffer<std::int64_t> cu_seqlens;  // texts + 1 entries: where each text's tokens start, and the end
};

struct BatchOptions {
  EncodeOptions encode;  // max_tokens counts tokens of the text, not those around it
  Around around;         // these have offsets (0, 0) and word id -1
  bool wide_ids = false;
  // Of all texts that stay: the others, at the end, are left out and seldom read. The first one stays in any case.
  std::size_t max_batch_tokens = static_cast<std::size_t>(-1);
  std::size_t num_threads = 0;  // 0: as many as the calling thread has processors and the batch is worth
};

// Tokens of all texts (that stay) in place of what `out` had; the result does not depend on the number of threads. Long
// texts are cut at safe places and shared as well. Besides the result, memory is needed for the tokens of 2 MB of text
// per thread. Throws what TextTokenizer::encode throws, and std::bad_alloc; `out` holds no result then.
void encode_batch(const TextTokenizer& tokenizer, const TextView* texts, std::size_t num_texts,
                  const BatchOptions& options, Batch& out);

}  // namespace bert_fast::wordpiece
