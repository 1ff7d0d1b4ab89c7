// Padded matrices as models take them: int64, straight from the texts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wordpiece/text_tokenizer.h"

namespace bert_fast::wordpiece {

// Which text of a pair is cut where a row is too long; a row of one text is cut in any case but by kOnlySecond.
enum class Truncation {
  kLongestFirst,  // the longer one, down to the shorter; from there on both, the odd token stays in the longer one
  kOnlyFirst,
  kOnlySecond,
};

struct RowOptions {
  std::int32_t cls = 0;
  std::int32_t sep = 0;
  std::int32_t pad = 0;
  std::int32_t pad_type = 0;        // token_type_ids of padding
  bool special = true;              // [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; without: A or A B
  std::size_t pair_separators = 1;  // how many [SEP] stand between A and B
  std::int32_t pair_type = 1;       // token_type_ids of B and the [SEP] behind it
  std::size_t max_length = 0;       // of a row, at least the number of its special tokens; 0: rows are not cut
  Truncation truncation = Truncation::kLongestFirst;
  bool truncate_left = false;   // cut off the start of texts, not the end
  std::size_t width = 0;        // of the matrices; 0: the longest row, rounded up to a multiple of multiple_of
  std::size_t multiple_of = 0;  // 0 and 1: not rounded
  bool pad_left = false;
  bool types = true;  // whether token_type_ids are wanted
  bool mask = true;   // whether attention_mask is wanted
};

struct Rows {
  Buffer<std::int64_t> input_ids;       // [num_rows, width]
  Buffer<std::int64_t> token_type_ids;  // the same, or empty; pair_type for B and the [SEP] behind it
  Buffer<std::int64_t> attention_mask;  // the same, or empty; 1 for all but padding
  std::size_t num_rows = 0;
  std::size_t width = 0;
};

// One row for each text, or for each pair of texts where has_pair (nullptr: nowhere) says that two belong together; the
// texts of all rows stand one after the other. Cut on the right, a long text is read only as far as it is kept. The
// result does not depend on num_threads (as in BatchOptions).
//
// False, and nothing in `out`, where this cannot be done: a row is longer than options.width, or the text that is to be
// cut is too short for it (or missing). Throws what encode_batch throws.
bool encode_rows(const TextTokenizer& tokenizer, const TextView* texts, const bool* has_pair, std::size_t num_rows,
                 const RowOptions& options, std::size_t num_threads, Rows& out);

}  // namespace bert_fast::wordpiece
