// The start of a text as an ASCII word: 16 bytes at a time, with SSE2 where the compiler targets x86-64 (every such CPU
// has it, so there is nothing to dispatch), otherwise with 64-bit integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(BERT_FAST_NO_SIMD)
#include <emmintrin.h>
#define BERT_FAST_WORDPIECE_SSE2 1
#endif

#include "wordpiece/vocab.h"

namespace bert_fast::wordpiece {

// Letters and digits of ASCII at the start of 16 bytes.
struct AsciiWord {
  std::size_t size;   // 16: no end within these bytes
  std::uint64_t low;  // the bytes of the word, lower-cased if asked for; zeros behind its end
  std::uint64_t high;

  WordKey key() const { return {low, high | static_cast<std::uint64_t>(size) << 56}; }  // size <= WordKey::kMaxBytes
  void write(char* out) const {                                                         // room for 16 bytes
    std::memcpy(out, &low, 8);
    std::memcpy(out + 8, &high, 8);
  }
};

// Portable form: one bit per byte, 8 bytes at a time.
inline AsciiWord read_ascii_word_portable(const char* p, bool lowercase) {
  constexpr std::uint64_t kOnes = 0x0101010101010101ULL, kHigh = 0x80 * kOnes;
  // High bit of every byte that is less than `bound` <= 128, for bytes below 128.
  const auto less = [](std::uint64_t x, std::uint64_t bound) { return ~(x + (128 - bound) * kOnes) & kHigh; };
  const auto not_word = [&](std::uint64_t x) {
    const std::uint64_t low = x & ~kHigh, folded = low | 0x20 * kOnes;
    const std::uint64_t letter = less(folded, 'z' + 1) & ~less(folded, 'a');
    const std::uint64_t digit = less(low, '9' + 1) & ~less(low, '0');
    return (~(letter | digit) | x) & kHigh;
  };
  std::uint64_t words[2];
  std::memcpy(words, p, 16);
  std::size_t size = 0;
  for (const std::uint64_t word : words) {
    const std::uint64_t ends = not_word(word);
    std::size_t here = 0;
    while (here < 8 && (static_cast<std::uint64_t>(0x80) << 8 * here & ends) == 0) ++here;
    size += here;
    if (here < 8) break;
  }
  for (std::uint64_t& word : words) word |= lowercase ? 0x20 * kOnes : 0;  // digits have this bit already
  const auto keep = [](std::size_t count) {
    return count >= 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << 8 * count) - 1;
  };
  return {size, words[0] & keep(size), size > 8 ? words[1] & keep(size - 8) : 0};
}

#ifdef BERT_FAST_WORDPIECE_SSE2
inline AsciiWord read_ascii_word_sse2(const char* p, bool lowercase) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i folded = _mm_or_si128(x, _mm_set1_epi8(0x20));
  // x - low <= high - low, unsigned, byte by byte
  const auto in_range = [](__m128i v, char low, char high) {
    const __m128i shifted = _mm_sub_epi8(v, _mm_set1_epi8(low));
    return _mm_cmpeq_epi8(_mm_min_epu8(shifted, _mm_set1_epi8(static_cast<char>(high - low))), shifted);
  };
  const __m128i word = _mm_or_si128(in_range(folded, 'a', 'z'), in_range(x, '0', '9'));
  const auto bits = static_cast<unsigned>(_mm_movemask_epi8(word));
  const auto size = static_cast<std::size_t>(__builtin_ctz(~bits));  // bit 16 of ~bits is always set
  // The bytes of 0xFF in front of position 16, as many as the word is long.
  alignas(16) static constexpr unsigned char kMask[32] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                                                          255, 255, 255, 255, 255, 0,   0,   0,   0,   0,   0,
                                                          0,   0,   0,   0,   0,   0,   0,   0,   0,   0};
  const __m128i keep = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMask + 16 - size));
  const __m128i kept = _mm_and_si128(lowercase ? folded : x, keep);  // digits have the bit of lower case already
  return {size, static_cast<std::uint64_t>(_mm_cvtsi128_si64(kept)),
          static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(kept, kept)))};
}
inline AsciiWord read_ascii_word(const char* p, bool lowercase) { return read_ascii_word_sse2(p, lowercase); }
#else
inline AsciiWord read_ascii_word(const char* p, bool lowercase) { return read_ascii_word_portable(p, lowercase); }
#endif

}  // namespace bert_fast::wordpiece
