// What the tests of csrc/cpu share: a failing check that names itself, inputs, and a scalar Philox to judge by.

#ifndef BERT_FAST_TESTS_CPU_CHECK_H_
#define BERT_FAST_TESTS_CPU_CHECK_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace bert_fast::cpu::testing {

#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::fprintf(stderr, "%s:%d: %s fails (simd level %s)\n", __FILE__, __LINE__, #condition, \
                   ::bert_fast::cpu::simd_level());                                             \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (false)

// |actual - expected| within `bound` of the larger of |expected| and 1.
inline bool is_close(double actual, double expected, double bound) {
  return std::abs(actual - expected) <= bound * std::max(std::abs(expected), 1.0);
}

// Runs `test` once for each table of kernels of this machine; of_int8: of the tables of the INT8 product, of which
// there are more.
template <class Test>
void for_every_level(const Test& test, bool of_int8 = false) {
  const Kernels* before = nullptr;
  for (const std::string& level : simd_levels()) {
    force_simd_level(level);
    if (&kernels() == before && !of_int8) continue;
    before = &kernels();
    test();
  }
  force_simd_level("auto");
}

template <class Action>
bool throws_invalid_argument(const Action& action) {
  try {
    action();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// Values in [-1, 1) that are the same everywhere: a 32-bit linear congruential generator.
class Values {
 public:
  explicit Values(uint32_t seed) : state_(seed) {}
  uint32_t next_int() { return state_ = state_ * 1664525u + 1013904223u; }
  float next() { return static_cast<float>(static_cast<int32_t>(next_int())) / 2147483648.0f; }
  std::vector<float> vector(int64_t size, float scale = 1.0f, float offset = 0.0f) {
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) value = next() * scale + offset;
    return values;
  }

 private:
  uint32_t state_;
};

// Philox4x32-7, word by word as Salmon et al. write it.
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Whether the element is kept, straight from the definition.
inline bool kept(const DropoutSpec& spec, uint32_t row, uint32_t position, uint32_t column) {
  const uint32_t word = philox({column / 8, position, row, spec.site}, spec.seed)[column % 8 / 2];
  return (column % 2 == 0 ? word & 0xFFFFu : word >> 16) >= spec.threshold;
}

// The same for the probability of key number `key`, see bert_fast/reference/dropout.py:attention_keep_mask.
inline bool kept_probability(const DropoutSpec& spec, uint32_t row, uint32_t position, uint32_t head, uint32_t key) {
  const uint32_t block = head * 8192 + key / 32 * 4 + key % 8 / 2;
  const uint32_t word = philox({block, position, row, spec.site}, spec.seed)[key % 32 / 8];
  return (key % 2 == 0 ? word & 0xFFFFu : word >> 16) >= spec.threshold;
}

}  // namespace bert_fast::cpu::testing

#endif  // BERT_FAST_TESTS_CPU_CHECK_H_
