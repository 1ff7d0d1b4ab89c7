#include <immintrin.h>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {
namespace {

struct Isa {
  struct Block {
    __m256i low, high;
  };
  static Block load_block(const char* p) {
    const auto* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  static Block load_block(const char* p, std::size_t size) {
    char bytes[64] = {};
    __builtin_memcpy(bytes, p, size);
    return load_block(bytes);
  }

  static __m256i rows(const AsciiSet& set) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(set.rows)));
  }
  // A row has eight bits; bytes from 128 on match none: their row is 0, and the bits asked for are all.
  static std::uint64_t members(__m256i set_rows, __m256i x, __m256i column) {
    const __m256i hit = _mm256_and_si256(_mm256_shuffle_epi8(set_rows, x), column);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(hit, column)));
  }
  static __m256i columns(__m256i x) {
    const __m256i bits = _mm256_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, -1, -1, -1, -1, -1, -1, -1, -1, 1, 2, 4, 8, 16,
                                          32, 64, -128, -1, -1, -1, -1, -1, -1, -1, -1);
    return _mm256_shuffle_epi8(bits, _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)));
  }
  static __m256i lowered(__m256i x) {
    const __m256i shifted = _mm256_sub_epi8(x, _mm256_set1_epi8('A'));
    const __m256i is_upper = _mm256_cmpeq_epi8(_mm256_min_epu8(shifted, _mm256_set1_epi8(25)), shifted);
    return _mm256_or_si256(x, _mm256_and_si256(is_upper, _mm256_set1_epi8(0x20)));
  }

  static ClassMasks classify(const AsciiClasses& classes, const Block& block, char* out) {
    const __m256i low_columns = columns(block.low), high_columns = columns(block.high);
    const auto mask = [&](const AsciiSet& set) {
      const __m256i table = rows(set);
      return members(table, block.low, low_columns) | members(table, block.high, high_columns) << 32;
    };
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, classes.lowercase ? lowered(block.low) : block.low);
    _mm256_storeu_si256(to + 1, classes.lowercase ? lowered(block.high) : block.high);
    return {mask(classes.word), mask(classes.punctuation), mask(classes.space)};
  }

  // Eight at a time, whether there are so many or not.
  static void positions(std::uint64_t mask, std::uint32_t base, std::uint32_t* out) {
    const auto count = static_cast<std::uint32_t>(_mm_popcnt_u64(mask));
    for (std::uint32_t done = 0; done < count; done += 8) {
      for (std::uint32_t k = 0; k < 8; ++k) {
        out[done + k] = base + static_cast<std::uint32_t>(_tzcnt_u64(mask));
        mask = _blsr_u64(mask);
      }
    }
  }
};

#include "wordpiece/kernels_body.h"

constexpr Kernels kKernels = {"avx2", bmi2_word_kernels, scan, narrow16, narrow32, widen};

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace bert_fast::wordpiece
