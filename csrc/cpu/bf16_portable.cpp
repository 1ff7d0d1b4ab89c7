// Any processor: loops over 16 lanes, which the compiler makes vectors of.

#include "cpu/bf16_body.h"

namespace bert_fast::cpu {
namespace {

struct Portable {
  static constexpr int kLanes = 16, kRows = 2, kColumns = 2, kDots = 2;
  struct F {
    float of[kLanes];
  };
  struct Words {
    Bf16 of[2 * kLanes];
  };
  using Operand = F;

  static F load(const float* p) { return load_first(p, kLanes); }
  static F load_first(const float* p, int n) {
    F made;
    for (int i = 0; i < kLanes; ++i) made.of[i] = i < n ? p[i] : 0.0f;
    return made;
  }
  static void store_rounded(Bf16* p, const F& x) {
    for (int i = 0; i < kLanes; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, &x.of[i], sizeof(bits));
      const bool is_nan = x.of[i] != x.of[i];
      p[i] = static_cast<Bf16>((is_nan ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
  }
  static Words load_words(const Bf16* p) {
    Words made;
    __builtin_memcpy(&made, p, sizeof(made));
    return made;
  }
  template <int number>
  static Operand operand(const Words& words) {
    Operand made;
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t bits = uint32_t{words.of[2 * i + number]} << 16;
      __builtin_memcpy(&made.of[i], &bits, sizeof(bits));
    }
    return made;
  }
  static F zero() { return F{}; }
  static F dot(const F& sum, const Operand& a, const Operand& b) {
    F made;
    for (int i = 0; i < kLanes; ++i) made.of[i] = sum.of[i] + a.of[i] * b.of[i];
    return made;
  }
  static float reduce_add(F x) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) x.of[i] += x.of[i + half];
    }
    return x.of[0];
  }
};

constexpr Bf16Kernels kTable = {Bf16Body<Portable>::round, Bf16Body<Portable>::pack, Bf16Body<Portable>::linear,
                                nullptr};

}  // namespace

const Bf16Kernels* portable_bf16_kernels() { return &kTable; }

}  // namespace bert_fast::cpu
