// AVX2: products of 16 bits, so that pairs of them do not saturate.

#include "cpu/int8.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include "cpu/int8_body.h"

namespace bert_fast::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  using Bytes = __m256i;
  static constexpr int kLanes = 8, kRows = 4, kBlocks = 1;

  static I first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  static I load_ints(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
  static I load_ints_first(const int32_t* p, int n) { return _mm256_maskload_epi32(p, first(n)); }
  static I load_bytes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  template <class Function>
  static float reduce(F x, Function function) {
    __m128 all = function(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    all = function(all, _mm_movehl_ps(all, all));
    return _mm_cvtss_f32(function(all, _mm_movehdup_ps(all)));
  }
  static float reduce_min(F x) {
    return reduce(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); });
  }
  static float reduce_max(F x) {
    return reduce(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
  }
  static float reduce_add(F x) {
    return reduce(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
  }
  static I subtract_product(I a, I b, I c) { return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, c)); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static void store_quantized(uint8_t* p, F x, float inverse, int32_t zero) {
    const I rounded = _mm256_add_epi32(_mm256_cvtps_epi32(multiply(x, set1(inverse))), set1_int(zero));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static Bytes spread(const uint8_t* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    return _mm256_set1_epi32(bytes);
  }
  static I dot(I acc, Bytes bytes, I weights) {
    const I even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8));
    const I odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(weights, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
  }
};

constexpr Int8Kernels kTable = {Int8Body<Avx2>::quantize, Int8Body<Avx2>::linear};

}  // namespace

const Int8Kernels* avx2_int8_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Int8Kernels* avx2_int8_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
