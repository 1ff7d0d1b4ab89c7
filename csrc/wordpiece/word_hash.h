// The hash function of the word table. Internal linkage: every file has its own copy, compiled for its instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {

// The first min(size, 16) bytes at p, where 16 are readable; then zeros.
static inline WordKey load_word(const char* p, std::size_t size) {
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  // [2 * size]: the masks of the first and the second eight bytes.
  static constexpr std::uint64_t kKeep[34] = {
      0,          0,          kAll >> 56, 0,          kAll >> 48, 0,          kAll >> 40, 0,          kAll >> 32,
      0,          kAll >> 24, 0,          kAll >> 16, 0,          kAll >> 8,  0,          kAll,       0,
      kAll,       kAll >> 56, kAll,       kAll >> 48, kAll,       kAll >> 40, kAll,       kAll >> 32, kAll,
      kAll >> 24, kAll,       kAll >> 16, kAll,       kAll >> 8,  kAll,       kAll};
  const std::uint64_t* const keep = kKeep + 2 * (size < WordKey::kMaxBytes ? size : WordKey::kMaxBytes);
  WordKey word;
  __builtin_memcpy(&word.low, p, 8);
  __builtin_memcpy(&word.high, p + 8, 8);
  word.low &= keep[0];
  word.high &= keep[1];
  return word;
}

// The upper bits are the good ones: each depends on all bits of the word below it.
static inline std::uint64_t hash_word(const WordKey& key, std::uint64_t seed) {
  return key.low * seed + key.high * 0x9E3779B97F4A7C15ULL;
}

// Where a word stands if it is in the table. Its hash names a bucket; the bucket's multiplier, the slot.
static inline std::uint32_t slot_of(std::uint64_t hash, std::uint32_t multiplier, std::uint32_t slot_shift) {
  return static_cast<std::uint32_t>(hash * multiplier >> slot_shift);
}

static inline std::uint32_t find_slot(const WordTableView& table, const WordKey& key) {
  const std::uint64_t hash = hash_word(key, table.seed);
  return slot_of(hash, table.multipliers[hash >> table.bucket_shift], table.slot_shift);
}

}  // namespace bert_fast::wordpiece
