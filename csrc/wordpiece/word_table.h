// Short words -> ids, by a perfect hash function: every word has one slot and no two share one, so a look-up is
// straight-line code and a miss costs as much as a hit.
//
// A word's hash names its bucket; each bucket has a multiplier, found by trial when the table is built, that sends its
// words to free slots ("hash, displace": Fox et al. 1992; Belazzougui et al. 2009). 96 % of the words of English prose
// are found here. Keys lie in the order of ids, which is nearly that of frequency, so that common words share cache
// lines.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {

class WordTable {
 public:
  struct Entry {
    std::string_view text;  // 1 to WordKey::kMaxBytes bytes of UTF-8, none of them NUL
    std::uint32_t id;       // smaller than num_ids
  };

  // Entries are distinct.
  WordTable(const std::vector<Entry>& entries, std::size_t num_ids);

  WordTableView view() const {
    return {keys_.data(), slots_.data(), multipliers_.data(), seed_, bucket_shift_, slot_shift_};
  }

 private:
  struct Word {
    std::uint64_t hash;
    std::uint32_t id;
  };
  bool place(const std::vector<Word>& words, std::size_t num_ids);

  std::vector<WordKey> keys_;
  std::vector<std::uint32_t> slots_;
  std::vector<std::uint32_t> multipliers_;
  std::uint64_t seed_ = 0;
  std::uint32_t bucket_shift_ = 0;
  std::uint32_t slot_shift_ = 0;
};

}  // namespace bert_fast::wordpiece
