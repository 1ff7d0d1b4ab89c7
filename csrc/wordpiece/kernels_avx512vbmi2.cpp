#include <immintrin.h>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {
namespace {

struct Isa {
  using Block = __m512i;
  static Block load_block(const char* p) { return _mm512_loadu_si512(p); }
  static Block load_block(const char* p, std::size_t size) {
    return _mm512_maskz_loadu_epi8(_bzhi_u64(~std::uint64_t{0}, static_cast<unsigned>(size)), p);
  }

  // A row has eight bits; bytes from 128 on have row 0.
  static std::uint64_t members(const AsciiSet& set, __m512i x, __m512i column) {
    const __m512i rows = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(set.rows)));
    return _mm512_test_epi8_mask(_mm512_shuffle_epi8(rows, x), column);
  }

  static ClassMasks classify(const AsciiClasses& classes, Block x, char* out) {
    const __m512i bits = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i column = _mm512_shuffle_epi8(bits, _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)));
    const __mmask64 is_upper = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(x, _mm512_set1_epi8('A')), _mm512_set1_epi8(26));
    const __mmask64 changed = classes.lowercase ? is_upper : 0;
    _mm512_storeu_si512(out, _mm512_mask_add_epi8(x, changed, x, _mm512_set1_epi8(0x20)));
    return {members(classes.word, x, column), members(classes.punctuation, x, column),
            members(classes.space, x, column)};
  }

  static void positions(std::uint64_t mask, std::uint32_t base, std::uint32_t* out) {
    alignas(64) static constexpr unsigned char kIota[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const __m512i packed = _mm512_maskz_compress_epi8(mask, _mm512_load_si512(kIota));
    const __m512i bases = _mm512_set1_epi32(static_cast<int>(base));
    const auto store = [&](__m128i positions, std::uint32_t* to) {
      _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_cvtepu8_epi32(positions), bases));
    };
    store(_mm512_castsi512_si128(packed), out);
    const long long count = _mm_popcnt_u64(mask);
    if (count <= 16) return;
    store(_mm512_extracti32x4_epi32(packed, 1), out + 16);
    if (count <= 32) return;
    store(_mm512_extracti32x4_epi32(packed, 2), out + 32);
    store(_mm512_extracti32x4_epi32(packed, 3), out + 48);
  }
};

#include "wordpiece/kernels_body.h"

constexpr Kernels kKernels = {"avx512", bmi2_word_kernels, scan, narrow16, narrow32, widen};

}  // namespace

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace bert_fast::wordpiece
