// AVX-512 (F, BW, VL, DQ): 16 floats or 8 Philox blocks at a time.

#include "cpu/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes its own header's deliberately undefined vectors for a bug wherever they are inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "cpu/kernels_linear.h"

namespace bert_fast::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16, kTileVectors = 4, kLinearRows = 8;

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static F select_first(F x, F other, int n) { return _mm512_mask_mov_ps(other, first(n), x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  static F reciprocal(F x) {
    const F guess = _mm512_rcp14_ps(x);
    return _mm512_fmadd_ps(guess, _mm512_fnmadd_ps(guess, x, set1(1.0f)), guess);
  }
  static F groups(const float* rows, int64_t stride) {
    F all = _mm512_castps128_ps512(_mm_loadu_ps(rows));
    all = _mm512_mask_broadcast_f32x4(all, 0x00F0, _mm_loadu_ps(rows + stride));
    all = _mm512_mask_broadcast_f32x4(all, 0x0F00, _mm_loadu_ps(rows + 2 * stride));
    return _mm512_mask_broadcast_f32x4(all, 0xF000, _mm_loadu_ps(rows + 3 * stride));
  }
  static F every_group(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  static F group_sums(const F* v) {
    const F first = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const F second = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const F all = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xEE));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
  }
  static F zero_where_less(F x, F a, F b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x); }
  static F power_of_two(F magic) {
    const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(magic), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }
  static F keep(F x, const uint8_t* bits, int64_t column) {
    uint16_t mask;
    __builtin_memcpy(&mask, bits + column / 8, sizeof(mask));
    return _mm512_maskz_mov_ps(mask, x);
  }

  static F interleave_low(F a, F b) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, order, b);
  }
  static F interleave_high(F a, F b) {
    const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, order, b);
  }

  using Words = __m512i;
  static constexpr int kBlocks = 8;

  static Words words(uint32_t x) { return _mm512_set1_epi64(x); }
  // Lane 2i holds block i and lane 2i + 1 block 4 + i, so that the unpacks of store_keep_bits give blocks in order.
  static Words block_words(uint32_t first_block) {
    return _mm512_add_epi32(words(first_block), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static Words multiply(Words a, uint32_t b) { return _mm512_mul_epu32(a, words(b)); }
  static Words high(Words product) { return _mm512_srli_epi64(product, 32); }
  static Words mix(Words a, Words b, Words c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }  // a ^ b ^ c
  static void store_keep_bits(Words w0, Words w1, Words w2, Words w3, uint32_t threshold, uint8_t* bits) {
    const __m512i w01 = _mm512_mask_shuffle_epi32(w0, 0xAAAA, w1, _MM_PERM_CCAA);
    const __m512i w23 = _mm512_mask_shuffle_epi32(w2, 0xAAAA, w3, _MM_PERM_CCAA);
    const __m512i limit = _mm512_set1_epi16(static_cast<short>(threshold));
    const uint64_t low = _mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(w01, w23), limit);
    const uint64_t high = _mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(w01, w23), limit);
    const uint64_t all = low | high << 32;
    __builtin_memcpy(bits, &all, sizeof(all));
  }
};

constexpr Kernels kTable = kernels_of<Avx512>();

}  // namespace

const Kernels* avx512_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
