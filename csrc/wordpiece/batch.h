// A batch of texts on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "wordpiece/tokenizer.h"

namespace bert_fast::wordpiece {

struct Batch {
  Tokens tokens;                    // of all texts, in order
  Buffer<std::int64_t> cu_seqlens;  // texts + 1 entries: where each text's tokens start, and the end
};

// Number of threads that encode_batch would use for that many bytes; num_threads as there.
std::size_t plan_threads(std::size_t num_bytes, std::size_t num_texts, std::size_t num_threads);

// Tokens of all texts; the result does not depend on the number of threads. num_threads: 0 means as many as the
// hardware has and the batch is worth, 1 the calling thread alone. Threads live no longer than the call, so a process
// may fork.
void encode_batch(const Tokenizer& tokenizer, const std::vector<TextView>& texts, const EncodeOptions& wanted,
                  std::size_t num_threads, Batch& out);

}  // namespace bert_fast::wordpiece
