#include "wordpiece/word_table.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "wordpiece/word_hash.h"

namespace bert_fast::wordpiece {
namespace {

constexpr WordKey kNoWord = {~std::uint64_t{0}, ~std::uint64_t{0}};  // no UTF-8 has bytes of 255

WordKey make_key(std::string_view text) {
  char bytes[WordKey::kMaxBytes] = {};
  std::memcpy(bytes, text.data(), text.size());
  return load_word(bytes, text.size());
}

}  // namespace

WordTable::WordTable(const std::vector<Entry>& entries, std::size_t num_ids) : keys_(num_ids + 1, kNoWord) {
  std::vector<Word> words;
  words.reserve(entries.size());
  for (const Entry& entry : entries) {
    keys_[entry.id] = make_key(entry.text);
    words.push_back({0, entry.id});
  }
  // At most three quarters of the slots are taken; four words a bucket, so that few trials suffice.
  std::uint32_t slot_bits = 4, bucket_bits = 2;
  while (words.size() * 4 > std::size_t{3} << slot_bits) ++slot_bits;
  while (std::size_t{4} << bucket_bits < words.size()) ++bucket_bits;
  slot_shift_ = 64 - slot_bits;
  bucket_shift_ = 64 - bucket_bits;
  slots_.resize(std::size_t{1} << slot_bits);
  multipliers_.resize(std::size_t{1} << bucket_bits);
  // A seed fails where it sends two words to the same place whatever the multiplier: few do, for any vocabulary.
  for (int tries = 0; tries < 64; ++tries) {
    seed_ = (seed_ * 0xD6E8FEB86659FD93ULL + 0xA0761D6478BD642FULL) | 1;
    for (Word& word : words) word.hash = hash_word(keys_[word.id], seed_);
    if (place(words, num_ids)) return;
  }
  throw std::invalid_argument("vocab: no hash function separates its words");
}

bool WordTable::place(const std::vector<Word>& words, std::size_t num_ids) {
  // Words in the order of their buckets, by counting; then the buckets, the fullest first.
  const std::size_t num_buckets = multipliers_.size();
  const auto bucket_of = [&](const Word& word) { return word.hash >> bucket_shift_; };
  std::vector<std::uint32_t> firsts(num_buckets + 1, 0);
  for (const Word& word : words) ++firsts[bucket_of(word) + 1];
  const std::uint32_t fullest = *std::max_element(firsts.begin(), firsts.end());
  std::vector<std::vector<std::uint32_t>> by_size(fullest + 1);
  for (std::size_t b = 0; b < num_buckets; ++b) {
    by_size[firsts[b + 1]].push_back(static_cast<std::uint32_t>(b));
    firsts[b + 1] += firsts[b];
  }
  std::vector<Word> sorted(words.size());
  std::vector<std::uint32_t> next(firsts.begin(), firsts.end() - 1);
  for (const Word& word : words) sorted[next[bucket_of(word)]++] = word;

  const auto empty = static_cast<std::uint32_t>(num_ids);  // the key that no word has
  std::fill(slots_.begin(), slots_.end(), empty);
  std::fill(multipliers_.begin(), multipliers_.end(), 1U);
  constexpr int kMaxTrials = 1 << 16;
  for (std::uint32_t size = fullest; size > 0; --size) {
    for (const std::uint32_t bucket : by_size[size]) {
      const Word* const own = sorted.data() + firsts[bucket];
      std::uint32_t multiplier = 0x9E3779B1U;
      bool fits = false;
      for (int trial = 0; trial < kMaxTrials && !fits; ++trial) {
        multiplier = multiplier * 0x915F77F5U + 0x6C8E9CF6U;  // stays odd
        std::uint32_t placed = 0;
        for (; placed < size; ++placed) {
          std::uint32_t& slot = slots_[slot_of(own[placed].hash, multiplier, slot_shift_)];
          if (slot != empty) break;
          slot = own[placed].id;
        }
        fits = placed == size;
        while (!fits && placed > 0) slots_[slot_of(own[--placed].hash, multiplier, slot_shift_)] = empty;
      }
      if (!fits) return false;
      multipliers_[bucket] = multiplier;
    }
  }
  return true;
}

}  // namespace bert_fast::wordpiece
