// Linear layers of bf16 products against sums in fp64 of the rounded inputs, on exactly sized buffers so that a
// sanitizer sees every access beyond a row; a row has the same bits alone, among others and by any number of threads,
// and a weight the same results in bf16 and rounded from fp32.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/linear_bf16.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
constexpr Bf16 kNanBits = 0x7FC0;

bool same_bits(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

float from_bits(uint32_t bits) {
  float made;
  std::memcpy(&made, &bits, sizeof(made));
  return made;
}

uint32_t bits_of(float value) {
  uint32_t made;
  std::memcpy(&made, &value, sizeof(made));
  return made;
}

// To nearest, ties to even, by the distances to the two neighbours; normal numbers that stay finite.
Bf16 rounded(float value) {
  const uint32_t below = bits_of(value) & 0xFFFF0000u, above = below + 0x10000u;
  const double to_below = std::abs(double{value} - from_bits(below)),
               to_above = std::abs(from_bits(above) - double{value});
  const bool is_even = (below >> 16) % 2 == 0;
  return static_cast<Bf16>((to_below < to_above || (to_below == to_above && is_even) ? below : above) >> 16);
}

std::vector<Bf16> rounded(const std::vector<float>& values) {
  std::vector<Bf16> made;
  for (const float value : values) made.push_back(value == 0.0f ? Bf16{0} : rounded(value));
  return made;
}

double widened(Bf16 value) { return from_bits(uint32_t{value} << 16); }

// Rows of k values that lie `stride` apart, `between` in the gaps, and nothing behind the last.
template <class T>
std::vector<T> spread(const std::vector<T>& rows, int64_t num_rows, int64_t k, int64_t stride, T between) {
  std::vector<T> made(static_cast<size_t>(num_rows == 0 ? 0 : (num_rows - 1) * stride + k), between);
  for (int64_t i = 0; i < num_rows; ++i) std::copy_n(rows.begin() + i * k, k, made.begin() + i * stride);
  return made;
}

// A copy that ends where the process may not read: sanitizers do not see what tiles load.
template <class T>
class BeforeNothing {
 public:
  explicit BeforeNothing(const std::vector<T>& values) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = values.size() * sizeof(T), whole = (bytes + page - 1) / page * page;
    size_ = whole + page;
    pages_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(pages_ != MAP_FAILED && mprotect(pages_ + whole, page, PROT_NONE) == 0);
    data_ = reinterpret_cast<T*>(pages_ + whole - bytes);
    std::copy(values.begin(), values.end(), data_);
  }
  ~BeforeNothing() { munmap(pages_, size_); }
  BeforeNothing(const BeforeNothing&) = delete;
  BeforeNothing& operator=(const BeforeNothing&) = delete;
  const T* data() const { return data_; }

 private:
  char* pages_;
  T* data_;
  size_t size_;
};

void check(const std::vector<float>& x, const std::vector<float>& weight, int64_t num_rows, int64_t num_columns,
           int64_t k, int64_t gap, bool has_bias) {
  Values values(24);
  const int64_t stride = k + gap;
  const std::vector<float> bias = values.vector(num_columns);
  const std::vector<Bf16> x_bf16 = rounded(x), weight_bf16 = rounded(weight);
  const BeforeNothing<float> x_rows(spread(x, num_rows, k, stride, kNan));
  const BeforeNothing<float> weight_rows(spread(weight, num_columns, k, stride, kNan));
  const BeforeNothing<Bf16> weight_bf16_rows(spread(weight_bf16, num_columns, k, stride, kNanBits));
  Weights part{nullptr, stride, has_bias ? bias.data() : nullptr, num_columns};
  part.bf16 = weight_bf16_rows.data();
  const auto run = [&](const Weights& weights, int64_t first, int64_t rows, int num_threads) {
    std::vector<float> y(static_cast<size_t>(rows * num_columns), kNan);
    linear({x_rows.data() + first * stride, stride}, &weights, 1, {y.data(), num_columns}, rows, k, nullptr,
           num_threads);
    return y;
  };
  const std::vector<float> y = run(part, 0, num_rows, 1);
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) {
      double sum = has_bias ? bias[static_cast<size_t>(j)] : 0.0, size = std::abs(sum);
      for (int64_t c = 0; c < k; ++c) {
        const double product =
            widened(x_bf16[static_cast<size_t>(i * k + c)]) * widened(weight_bf16[static_cast<size_t>(j * k + c)]);
        sum += product;
        size += std::abs(product);
      }
      // A rounding of 2^-24 for each of k / 16 sums and some more, of which the worst did not come up.
      const double bound = size * (8.0 + static_cast<double>(k) / 16.0) * 6e-8;
      CHECK(std::abs(y[static_cast<size_t>(i * num_columns + j)] - sum) <= bound);
    }
  }
  Weights in_fp32{weight_rows.data(), stride, part.bias, num_columns};
  in_fp32.is_rounded = true;
  CHECK(same_bits(run(in_fp32, 0, num_rows, 1).data(), y.data(), num_rows * num_columns));
  for (const int num_threads : {2, 3, 7}) {
    CHECK(same_bits(run(part, 0, num_rows, num_threads).data(), y.data(), num_rows * num_columns));
    CHECK(same_bits(run(in_fp32, 0, num_rows, num_threads).data(), y.data(), num_rows * num_columns));
  }
  for (int64_t first = 0; first < num_rows; first += 1 + num_rows / 7) {
    for (const int64_t rows : {int64_t{1}, int64_t{2}, num_rows - first}) {
      if (first + rows > num_rows) continue;
      CHECK(same_bits(run(part, first, rows, 1).data(), y.data() + first * num_columns, rows * num_columns));
    }
  }
}

// Rows lie farther apart than they are long, with NaN in between.
void test_shapes() {
  const int64_t shapes[][3] = {{1, 1, 1},      {5, 13, 7},    {33, 50, 100}, {100, 31, 65}, {16, 16, 32}, {17, 33, 63},
                               {32, 64, 128},  {150, 140, 9}, {3, 5, 0},     {0, 5, 4},     {5, 0, 4},    {40, 200, 96},
                               {2, 70, 16500}, {65, 48, 64},  {34, 16, 31},  {1, 300, 256}};
  for (const auto& [num_rows, num_columns, k] : shapes) {
    Values values(25);
    const std::vector<float> x = values.vector(num_rows * k, 3.0f, 0.5f), weight = values.vector(num_columns * k);
    for (const bool has_bias : {false, true}) {
      for (const int64_t gap : {0, 3}) check(x, weight, num_rows, num_columns, k, gap, has_bias);
    }
  }
}

// More rows than are rounded at a time: 32 of 16,384 values are a block.
void test_many_blocks() {
  Values values(26);
  const int64_t num_rows = 75, num_columns = 33, k = 16384;
  check(values.vector(num_rows * k), values.vector(num_columns * k), num_rows, num_columns, k, 0, true);
}

void test_rounding() {
  const auto made = [](float value) {
    std::vector<Bf16> all(kBf16Steps, Bf16{1});
    bf16_kernels().round(&value, 1, all.data());
    for (int64_t i = 1; i < kBf16Steps; ++i) CHECK(all[static_cast<size_t>(i)] == 0);
    return all[0];
  };
  const uint32_t expected[][2] = {
      {0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, {0x3F808001, 0x3F81}, {0x3F817FFF, 0x3F81}, {0x3F818000, 0x3F82},
      {0xBF818000, 0xBF82}, {0xBF808000, 0xBF80}, {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x00800000, 0x0080},
      {0x7F7FFFFF, 0x7F80}, {0x7F7F7FFF, 0x7F7F}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}};
  for (const auto& [bits, rounded_bits] : expected) CHECK(made(from_bits(bits)) == rounded_bits);
  for (const uint32_t bits : {0x7FC00000u, 0x7F800001u, 0xFFFFFFFFu, 0x7FFFFFFFu, 0xFF80FFFFu}) {
    CHECK(std::isnan(widened(made(from_bits(bits)))));
  }
  Values values(27);
  for (int i = 0; i < 10000; ++i) {
    const float value = from_bits((values.next_int() & 0x807FFFFFu) | (values.next_int() % 250 + 1) << 23);
    CHECK(made(value) == rounded(value));
  }
}

// What is not finite stays in its row of x, and in its row of weights.
void test_not_finite() {
  const int64_t num_rows = 40, num_columns = 50, k = 70;
  Values values(28);
  std::vector<float> x = values.vector(num_rows * k), weight = values.vector(num_columns * k);
  x[5 * k + 69] = kNan;
  x[33 * k] = kInfinity;
  weight[7 * k + 3] = -kInfinity;
  weight[49 * k + 69] = kNan;
  std::vector<float> y(static_cast<size_t>(num_rows * num_columns));
  Weights part{weight.data(), k, nullptr, num_columns};
  part.is_rounded = true;
  linear({x.data(), k}, &part, 1, {y.data(), num_columns}, num_rows, k, nullptr, 2);
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) {
      const bool is_finite = i != 5 && i != 33 && j != 7 && j != 49;
      const float actual = y[static_cast<size_t>(i * num_columns + j)];
      CHECK(std::isfinite(actual) == is_finite);
      if (i == 5 || j == 49) CHECK(std::isnan(actual));
    }
  }
}

// Parts side by side, with an activation, are the layers one by one.
void test_parts() {
  Values values(29);
  const int64_t num_rows = 230, k = 64, widths[] = {30, 1, 155};
  const std::vector<float> x = values.vector(num_rows * k), bias = values.vector(155);
  std::vector<std::vector<Bf16>> weights;
  std::vector<Weights> parts;
  int64_t all = 0;
  for (const int64_t width : widths) {
    weights.push_back(rounded(values.vector(width * k)));
    parts.push_back({nullptr, k, all == 30 ? nullptr : bias.data(), width});
    parts.back().bf16 = weights.back().data();
    all += width;
  }
  const Activation gelu = Activation::kGelu;
  std::vector<float> y(static_cast<size_t>(num_rows * all));
  linear({x.data(), k}, parts.data(), 3, {y.data(), all}, num_rows, k, &gelu, 2);
  int64_t first = 0;
  for (const Weights& part : parts) {
    std::vector<float> alone(static_cast<size_t>(num_rows * part.num_columns));
    linear({x.data(), k}, &part, 1, {alone.data(), part.num_columns}, num_rows, k, nullptr, 1);
    activate(alone.data(), alone.data(), num_rows * part.num_columns, gelu, 1);
    for (int64_t i = 0; i < num_rows; ++i) {
      CHECK(same_bits(y.data() + i * all + first, alone.data() + i * part.num_columns, part.num_columns));
    }
    first += part.num_columns;
  }
}

void test_bad_input() {
  const std::vector<float> x(12);
  const std::vector<Bf16> weight(12);
  std::vector<float> y(9);
  Weights part{nullptr, 4, nullptr, 3};
  part.bf16 = weight.data();
  const auto run = [&](const float* from, const Weights& weights, float* to, int64_t rows) {
    linear_bf16({from, 4}, &weights, 1, {to, 3}, rows, 4, nullptr, 1);
  };
  Weights wrong = part;
  wrong.bf16 = nullptr;
  CHECK(throws_invalid_argument([&] { run(x.data(), wrong, y.data(), 3); }));
  wrong.is_rounded = true;
  CHECK(throws_invalid_argument([&] { run(x.data(), wrong, y.data(), 3); }));
  CHECK(throws_invalid_argument([&] { run(nullptr, part, y.data(), 3); }));
  CHECK(throws_invalid_argument([&] { run(x.data(), part, nullptr, 3); }));
  CHECK(throws_invalid_argument([&] { run(x.data(), part, y.data(), -1); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    test_shapes();
    test_many_blocks();
    test_rounding();
    test_not_finite();
    test_parts();
    test_bad_input();
  });
  return 0;
}
