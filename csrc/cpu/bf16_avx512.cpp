// AVX-512 without products of bf16: both values of a pair become floats.

#include "cpu/bf16.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

#include "cpu/bf16_body.h"

namespace bert_fast::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  using Words = __m512i;
  using Operand = __m512;
  static constexpr int kLanes = 16, kRows = 4, kColumns = 6, kDots = 2;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
  static void store_rounded(Bf16* p, F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16)));
  }
  static Words load_words(const Bf16* p) { return _mm512_loadu_si512(p); }
  template <int number>
  static Operand operand(Words words) {
    if constexpr (number == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  static F zero() { return _mm512_setzero_ps(); }
  static F dot(F sum, Operand a, Operand b) { return _mm512_fmadd_ps(a, b, sum); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
};

constexpr Bf16Kernels kTable = {Bf16Body<Avx512>::round, Bf16Body<Avx512>::pack, Bf16Body<Avx512>::linear, nullptr};

}  // namespace

const Bf16Kernels* avx512_bf16_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Bf16Kernels* avx512_bf16_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
