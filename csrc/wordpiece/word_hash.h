// The hash functions of the word table. Internal linkage: every file has its own copy, compiled for its instruction
// set.
#pragma once

#include <cstdint>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {

// A 64 x 64 -> 128 bit product, its halves folded (the mixing step of wyhash).
static inline std::uint64_t hash_word(std::uint64_t low, std::uint64_t high, std::uint64_t seed) {
  const unsigned __int128 product = static_cast<unsigned __int128>(low ^ seed) * (high ^ 0x9E3779B97F4A7C15ULL);
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

static inline std::uint32_t bucket_of(std::uint64_t hash, std::uint32_t bucket_mask) {
  return static_cast<std::uint32_t>(hash) & bucket_mask;
}

// The slot of a word, given its bucket's multiplier: the top bits of a product.
static inline std::uint32_t slot_of(std::uint64_t hash, std::uint32_t multiplier, std::uint32_t slot_shift) {
  return (static_cast<std::uint32_t>(hash >> 32) * multiplier) >> slot_shift;
}

}  // namespace bert_fast::wordpiece
