// AVX2: both values of a pair become floats.

#include "cpu/bf16.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include "cpu/bf16_body.h"

namespace bert_fast::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  using Words = __m256i;
  using Operand = __m256;
  static constexpr int kLanes = 8, kRows = 3, kColumns = 3, kDots = 2;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_first(const float* p, int n) {
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  }
  static void store_rounded(Bf16* p, F x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one());
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_nan), 16);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
  }
  static Words load_words(const Bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int number>
  static Operand operand(Words words) {
    if constexpr (number == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  static F zero() { return _mm256_setzero_ps(); }
  static F dot(F sum, Operand a, Operand b) { return _mm256_fmadd_ps(a, b, sum); }
  static float reduce_add(F x) {
    __m128 all = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    all = _mm_add_ps(all, _mm_movehl_ps(all, all));
    return _mm_cvtss_f32(_mm_add_ss(all, _mm_movehdup_ps(all)));
  }

 private:
  static __m256i one() { return _mm256_set1_epi32(1); }
};

constexpr Bf16Kernels kTable = {Bf16Body<Avx2>::round, Bf16Body<Avx2>::pack, Bf16Body<Avx2>::linear, nullptr};

}  // namespace

const Bf16Kernels* avx2_bf16_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Bf16Kernels* avx2_bf16_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
