// Rotary position embedding against double-precision loops, on exactly sized buffers so that a sanitizer sees every
// access beyond a head; in place and beside it, the same bits for every number of threads.

#include "cpu/rotary.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

void test_rotary(int64_t num_tokens, int64_t num_heads, int64_t num_freqs, bool is_interleaved, bool is_backward) {
  Values values(5);
  const int64_t head_size = 2 * num_freqs, part_size = num_heads * head_size, token_size = 3 * part_size;
  const std::vector<float> x = values.vector(num_tokens * token_size);
  const std::vector<float> cos = values.vector(num_tokens * num_freqs), sin = values.vector(num_tokens * num_freqs);
  const HeadStrides strides{token_size, part_size, head_size};
  const auto run = [&](const float* from, float* to, int64_t num_parts, int num_threads) {
    rotary({from, to, cos.data(), sin.data(), num_tokens, num_parts, num_heads, num_freqs, 2, strides, strides,
            is_interleaved, is_backward},
           num_threads);
  };
  std::vector<float> y(x.size()), again(x.size()), over = x;
  run(x.data(), y.data(), 3, 1);
  run(x.data(), again.data(), 3, 3);
  run(over.data(), over.data(), 2, 2);
  CHECK(y == again && y == over);
  for (int64_t head = 0; head < num_tokens * 3 * num_heads; ++head) {
    const size_t start = static_cast<size_t>(head * head_size);
    const bool is_value = head / num_heads % 3 == 2;
    for (int64_t i = 0; i < num_freqs; ++i) {
      const size_t one = start + static_cast<size_t>(is_interleaved ? 2 * i : i);
      const size_t two = start + static_cast<size_t>(is_interleaved ? 2 * i + 1 : i + num_freqs);
      const size_t angle = static_cast<size_t>(head / (3 * num_heads) * num_freqs + i);
      const double c = is_value ? 1.0 : double{cos[angle]};
      const double s = is_value ? 0.0 : double{sin[angle]} * (is_backward ? -1.0 : 1.0);
      CHECK(std::abs(y[one] - (x[one] * c - x[two] * s)) <= 1e-6);
      CHECK(std::abs(y[two] - (x[two] * c + x[one] * s)) <= 1e-6);
    }
  }
}

void test_bad_arguments() {
  float x[12] = {};
  const auto run = [&](float* y, int64_t num_parts, int64_t turned_parts) {
    rotary({x, y, x, x, 1, num_parts, 2, 1, turned_parts, {12, 4, 2}, {12, 4, 2}, false, false}, 1);
  };
  CHECK(throws_invalid_argument([&] { run(nullptr, 3, 2); }));
  CHECK(throws_invalid_argument([&] { run(x, -1, 2); }));
  CHECK(throws_invalid_argument([&] { run(x, 1, 2); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  test_bad_arguments();
  for_every_level([] {
    for (const int64_t num_freqs : {1, 7, 8, 15, 16, 17, 32, 64}) {
      for (const bool is_interleaved : {false, true}) {
        for (const bool is_backward : {false, true}) {
          test_rotary(37, 3, num_freqs, is_interleaved, is_backward);
          test_rotary(0, 3, num_freqs, is_interleaved, is_backward);
        }
      }
    }
    test_rotary(1500, 2, 32, false, false);  // enough for threads
  });
  return 0;
}
