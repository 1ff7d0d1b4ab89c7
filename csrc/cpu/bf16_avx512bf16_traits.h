// What bf16_body.h asks of an instruction set, of AVX-512 with AVX512_BF16. In an unnamed namespace: each file that
// includes it is compiled for another processor.

#ifndef BERT_FAST_CPU_BF16_AVX512BF16_TRAITS_H_
#define BERT_FAST_CPU_BF16_AVX512BF16_TRAITS_H_

#include <immintrin.h>

#include <cstdint>

#include "cpu/bf16.h"

namespace bert_fast::cpu {
namespace {

struct Avx512Bf16 {
  using F = __m512;
  using Words = __m512i;
  using Operand = __m512bh;
  static constexpr int kLanes = 16, kRows = 4, kColumns = 6, kDots = 1;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
  static void store_rounded(Bf16* p, F x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    __builtin_memcpy(p, &rounded, sizeof(rounded));
  }
  static Words load_words(const Bf16* p) { return _mm512_loadu_si512(p); }
  template <int number>
  static Operand operand(Words words) {
    Operand made;
    __builtin_memcpy(&made, &words, sizeof(made));
    return made;
  }
  static F zero() { return _mm512_setzero_ps(); }
  static F dot(F sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
};

}  // namespace
}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_BF16_AVX512BF16_TRAITS_H_
