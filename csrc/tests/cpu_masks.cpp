// Masks: Philox against published answers, keep bits and the routines built on them against the scalar definition.

#include <cstring>

#include "cpu/dropout.h"
#include "cpu/keep_bits.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

// Known answers of Philox4x32 with 7 rounds from the authors' Random123 library (file kat_vectors).
void test_known_answers() {
  CHECK((philox({0, 0, 0, 0}, 0) == std::array<uint32_t, 4>{0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u}));
  const uint32_t ones = 0xFFFFFFFFu;
  CHECK((philox({ones, ones, ones, ones}, ~uint64_t{0}) ==
         std::array<uint32_t, 4>{0x5207ddc2u, 0x45165e59u, 0x4d8ee751u, 0x8c52f662u}));
}

void test_keep_bits() {
  for (const uint32_t threshold : {0u, 1u, 6554u, 32768u, 32769u, 65535u, 65536u}) {
    const DropoutSpec spec{0x8000000180000003u, 93, threshold, 1.0f};
    for (int64_t num_blocks = 1; num_blocks <= 19; ++num_blocks) {
      std::vector<uint8_t> bits(static_cast<size_t>(keep_bits_bytes(num_blocks * 8)));
      kernels().keep_bits(spec, 4000000000u, 511, 8192 * 11, num_blocks, bits.data());
      for (uint32_t c = 0; c < num_blocks * 8; ++c) {
        CHECK((bits[c / 8] >> (c % 8) & 1) == kept(spec, 4000000000u, 511, 65536 * 11 + c));
      }
    }
  }
}

void test_dropout_and_mask() {
  const DropoutSpec spec{~uint64_t{0}, 1, 19661, 65536.0f / 45875.0f};
  Values values(1);
  for (const int64_t num_cols : {1, 3, 8, 15, 16, 33, 64, 100, 770}) {
    const int64_t num_rows = 6, stride = num_cols + 2;
    std::vector<int32_t> coords;
    for (int64_t i = 0; i < 2 * num_rows; ++i) coords.push_back(static_cast<int32_t>(values.next_int() >> 20));
    const std::vector<float> src = values.vector(num_rows * stride - 2);  // the last row has no padding after it
    std::vector<float> dst(static_cast<size_t>(num_rows * num_cols));
    std::vector<uint8_t> mask(dst.size());
    dropout(dst.data(), src.data(), num_rows, num_cols, stride, coords.data(), spec, 2);
    keep_mask(mask.data(), num_rows, num_cols, coords.data(), spec, 2);
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int64_t c = 0; c < num_cols; ++c) {
        const Coords names{coords.data()};
        const bool keep = kept(spec, names.row(i), static_cast<uint32_t>(names.position(i)), static_cast<uint32_t>(c));
        const size_t element = static_cast<size_t>(i * num_cols + c);
        CHECK(mask[element] == (keep ? 1 : 0));
        CHECK(dst[element] == (keep ? src[static_cast<size_t>(i * stride + c)] * spec.scale : 0.0f));
      }
    }
  }
}

void test_probability_bits() {
  const int32_t queries[4] = {5, 300, 4, 0};
  for (const uint32_t threshold : {1u, 6554u, 32768u, 65536u}) {
    const DropoutSpec spec{77, 9, threshold, 1.0f};
    ProbabilityKeepBits drawer(kernels(), spec, Coords{queries}, 1000);
    for (const uint32_t num_keys : {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 1000}) {
      for (const uint32_t head : {0u, 1u, 15u}) {
        for (const uint32_t query : {0u, 1u}) {
          const uint8_t* bits = drawer.draw(query, head, num_keys);
          const uint32_t row = query == 0 ? 5 : 4, position = query == 0 ? 300 : 0;
          for (uint32_t c = 0; c < num_keys; ++c) {
            CHECK((bits[c / 8] >> (c % 8) & 1) == kept_probability(spec, row, position, head, c));
          }
        }
      }
    }
  }
}

void test_errors() {
  float x[8] = {};
  const int32_t coords[2] = {0, 65536}, equal[6] = {0, 3, 0, 4, 0, 4};
  CHECK(throws_invalid_argument([&] { dropout(x, x, 1, 8, 8, nullptr, DropoutSpec{0, 0, 1, 1.0f}, 1); }));
  CHECK(throws_invalid_argument([&] { dropout(x, x, 1, 8, 8, coords, DropoutSpec{0, 0, 65537, 1.0f}, 1); }));
  CHECK(throws_invalid_argument([&] { dropout(x, x, -1, 8, 8, coords, DropoutSpec{0, 0, 1, 1.0f}, 1); }));
  CHECK(throws_invalid_argument([&] { dropout(x, nullptr, 1, 8, 8, coords, DropoutSpec{0, 0, 1, 1.0f}, 1); }));
  CHECK(throws_invalid_argument([&] { dropout(x, x, int64_t{1} << 60, 8, 8, coords, DropoutSpec{0, 0, 1, 1.0f}, 1); }));
  CHECK(throws_invalid_argument([&] { require_ascending(Coords{equal}, 0, 3); }));
  require_ascending(Coords{equal}, 0, 2);
  const auto draw_for = [&](int64_t keys) { ProbabilityKeepBits(kernels(), DropoutSpec{0, 0, 1, 1}, {coords}, keys); };
  CHECK(throws_invalid_argument([&] { draw_for(65537); }));
  draw_for(65536);
  CHECK(throws_invalid_argument([] { force_simd_level("mmx"); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  test_known_answers();
  for_every_level([] {
    test_keep_bits();
    test_dropout_and_mask();
    test_probability_bits();
    test_errors();
  });
  return 0;
}
