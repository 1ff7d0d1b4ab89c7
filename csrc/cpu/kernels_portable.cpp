// Any processor: 4 floats at a time in the compiler's own vector type (SSE2 on x86-64, NEON on Arm), one Philox block.

#include "cpu/kernels_linear.h"

namespace bert_fast::cpu {
namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kTileVectors = 2, kLinearRows = 4;

  static I first(int n) { return I{0, 1, 2, 3} < I{n, n, n, n}; }
  static F load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static F load_first(const float* p, int n) {
    F x = {0, 0, 0, 0};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  static void store_first(float* p, F x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
  }
  static F select(I mask, F x, F other) { return reinterpret_cast<F>((mask & as_int(x)) | (~mask & as_int(other))); }
  static I as_int(F x) { return reinterpret_cast<I>(x); }
  static F select_first(F x, F other, int n) { return select(first(n), x, other); }
  static F set1(float x) { return F{x, x, x, x}; }
  static F fma(F a, F b, F c) { return a * b + c; }  // two roundings: no instruction for it is assumed
  static F fnma(F a, F b, F c) { return c - a * b; }
  static F min(F a, F b) { return select(a < b, a, b); }
  static F max(F a, F b) { return select(a > b, a, b); }
  static float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float reduce_max(F x) {
    float max = x[0];
    for (int i = 1; i < kLanes; ++i) max = x[i] > max ? x[i] : max;
    return max;
  }
  static F reciprocal(F x) { return set1(1.0f) / x; }
  static F groups(const float* rows, int64_t) { return load(rows); }
  static F every_group(const float* p) { return load(p); }
  static F group_sums(const F* v) { return F{reduce_add(v[0]), reduce_add(v[1]), reduce_add(v[2]), reduce_add(v[3])}; }
  static F zero_where_less(F x, F a, F b) { return reinterpret_cast<F>(~(a < b) & as_int(x)); }
  static F power_of_two(F magic) {
    // Unsigned: the magic's own bits are shifted out on purpose.
    typedef uint32_t U __attribute__((vector_size(16)));
    return reinterpret_cast<F>((reinterpret_cast<U>(magic) + 127u) << 23);
  }
  static F keep(F x, const uint8_t* bits, int64_t column) {
    const int32_t four = bits[column / 8] >> (column & 4);
    const I one_bit = {1, 2, 4, 8};
    const I kept = (I{four, four, four, four} & one_bit) == one_bit;
    return reinterpret_cast<F>(kept & as_int(x));
  }

  static F interleave_low(F a, F b) { return F{a[0], b[0], a[1], b[1]}; }
  static F interleave_high(F a, F b) { return F{a[2], b[2], a[3], b[3]}; }

  using Words = uint64_t;
  static constexpr int kBlocks = 1;

  static Words words(uint32_t x) { return x; }
  static Words block_words(uint32_t first_block) { return first_block; }
  static Words multiply(Words a, uint32_t b) { return (a & 0xFFFFFFFFu) * b; }
  static Words high(Words product) { return product >> 32; }
  static Words mix(Words a, Words b, Words c) { return a ^ b ^ c; }
  static void store_keep_bits(Words w0, Words w1, Words w2, Words w3, uint32_t threshold, uint8_t* bits) {
    const uint64_t words[4] = {w0, w1, w2, w3};
    uint32_t byte = 0;
    for (int j = 0; j < kColumnsPerBlock; ++j) {
      const uint32_t value = static_cast<uint32_t>(words[j / 2] >> (j % 2 * 16)) & 0xFFFFu;
      byte |= static_cast<uint32_t>(value >= threshold) << j;
    }
    *bits = static_cast<uint8_t>(byte);
  }
};

constexpr Kernels kTable = kernels_of<Portable>();

}  // namespace

const Kernels* portable_kernels() { return &kTable; }

}  // namespace bert_fast::cpu
