// AVX2 with FMA: 8 floats or 4 Philox blocks at a time.

#include "cpu/kernels.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include "cpu/kernels_linear.h"

namespace bert_fast::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8, kTileVectors = 2, kLinearRows = 4;

  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  static F select_first(F x, F other, int n) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(first(n))); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static float reduce_add(F x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  static float reduce_max(F x) {
    __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    max = _mm_max_ps(max, _mm_movehl_ps(max, max));
    return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
  }
  static F reciprocal(F x) {
    const F guess = _mm256_rcp_ps(x);
    return _mm256_fmadd_ps(guess, _mm256_fnmadd_ps(guess, x, set1(1.0f)), guess);
  }
  static F groups(const float* rows, int64_t stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows)), _mm_loadu_ps(rows + stride), 1);
  }
  static F every_group(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static F group_sums(const F* v) {
    const F first = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const F second = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const F all = _mm256_add_ps(_mm256_shuffle_ps(first, second, 0x44), _mm256_shuffle_ps(first, second, 0xEE));
    return _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static F zero_where_less(F x, F a, F b) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), x); }
  static F power_of_two(F magic) {
    const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(magic), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  static F keep(F x, const uint8_t* bits, int64_t column) {
    const __m256i one_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i kept = _mm256_and_si256(_mm256_set1_epi32(bits[column / 8]), one_bit);
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, one_bit)));
  }

  static F interleave_low(F a, F b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
  }
  static F interleave_high(F a, F b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
  }

  using Words = __m256i;
  static constexpr int kBlocks = 4;

  static Words words(uint32_t x) { return _mm256_set1_epi64x(x); }
  static Words block_words(uint32_t first_block) {
    return _mm256_add_epi32(words(first_block), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static Words multiply(Words a, uint32_t b) { return _mm256_mul_epu32(a, words(b)); }
  static Words high(Words product) { return _mm256_srli_epi64(product, 32); }
  static Words mix(Words a, Words b, Words c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  static void store_keep_bits(Words w0, Words w1, Words w2, Words w3, uint32_t threshold, uint8_t* bits) {
    const __m256i w01 = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xAA);
    const __m256i w23 = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xAA);
    const __m256i limit = _mm256_set1_epi16(static_cast<short>(threshold));
    // Unpacking gives blocks (0, 2) and (1, 3); packing 16 to 8 bits works inside 128-bit halves and restores 0 1 2 3.
    const __m256i even = at_least(_mm256_unpacklo_epi64(w01, w23), limit);
    const __m256i odd = at_least(_mm256_unpackhi_epi64(w01, w23), limit);
    const int all = _mm256_movemask_epi8(_mm256_packs_epi16(even, odd));
    __builtin_memcpy(bits, &all, sizeof(all));
  }
  static __m256i at_least(__m256i values, __m256i limit) {
    return _mm256_cmpeq_epi16(_mm256_max_epu16(values, limit), values);
  }
};

constexpr Kernels kTable = kernels_of<Avx2>();

}  // namespace

const Kernels* avx2_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
