// What int8_body.h asks of an instruction set, of AVX-512 (F, BW, VL, DQ), the dot product apart. In an unnamed
// namespace: each file that includes it is compiled for another processor.

#ifndef BERT_FAST_CPU_INT8_AVX512_TRAITS_H_
#define BERT_FAST_CPU_INT8_AVX512_TRAITS_H_

#include <immintrin.h>

#include <cstdint>

namespace bert_fast::cpu {
namespace {

struct Avx512Base {
  using F = __m512;
  using I = __m512i;
  using Bytes = __m512i;
  static constexpr int kLanes = 16, kRows = 6, kBlocks = 4;

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static I load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
  static I load_ints_first(const int32_t* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
  static I load_bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static float reduce_min(F x) { return _mm512_reduce_min_ps(x); }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  static I subtract_product(I a, I b, I c) { return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, c)); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static void store_quantized(uint8_t* p, F x, float inverse, int32_t zero) {
    const I rounded = _mm512_add_epi32(_mm512_cvtps_epi32(multiply(x, set1(inverse))), set1_int(zero));
    const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(rounded, _mm512_setzero_si512()));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  static Bytes spread(const uint8_t* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof(bytes));
    return _mm512_set1_epi32(bytes);
  }
};

}  // namespace
}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_INT8_AVX512_TRAITS_H_
