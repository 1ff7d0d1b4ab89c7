// Linear layers of int8 weights against sums of 64-bit integers, to the bit, on exactly sized buffers so that a
// sanitizer sees every access beyond a row; a row has the same bits alone, among others, by any number of threads and
// under every instruction set.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/linear_int8.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

bool same_bits(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// A weight [num_columns, k] of whole numbers, as the routine takes it.
struct Packed {
  Packed(const std::vector<int8_t>& weight, int64_t num_columns, int64_t k, Values& values)
      : bytes(static_cast<size_t>((num_columns + 15) / 16 * 16 * int8_padded(k))),
        scale(values.vector(num_columns, 0.01f, 0.02f)),
        sums(static_cast<size_t>(num_columns)),
        bias(values.vector(num_columns)) {
    for (int64_t n = 0; n < num_columns; ++n) {
      for (int64_t c = 0; c < k; ++c) {
        const int8_t one = weight[static_cast<size_t>(n * k + c)];
        bytes[static_cast<size_t>(n / 16 * 16 * int8_padded(k) + c / 4 * 64 + n % 16 * 4 + c % 4)] = one;
        sums[static_cast<size_t>(n)] += one;
      }
    }
  }
  Weights part(bool has_bias) const {
    return {nullptr,
            0,
            has_bias ? bias.data() : nullptr,
            static_cast<int64_t>(sums.size()),
            {bytes.data(), scale.data(), sums.data()}};
  }
  std::vector<int8_t> bytes;
  std::vector<float> scale;
  std::vector<int32_t> sums;
  std::vector<float> bias;
};

std::vector<int8_t> bytes_of(int64_t size, Values& values) {
  std::vector<int8_t> made(static_cast<size_t>(size));
  for (int8_t& one : made) one = static_cast<int8_t>(static_cast<int32_t>(values.next_int() >> 8) % 255 - 127);
  return made;
}

// The row as reference/linear_int8.py rounds it.
Int8Row expected_row(const float* x, int64_t k, std::vector<int64_t>* q) {
  float least = 0.0f, greatest = 0.0f;
  q->assign(static_cast<size_t>(k), 0);
  for (int64_t c = 0; c < k; ++c) {
    if (!std::isfinite(x[c])) return {kNan, 0};
    least = std::min(least, x[c]);
    greatest = std::max(greatest, x[c]);
  }
  volatile float low = least * (1.0f / 255.0f), high = greatest * (1.0f / 255.0f);  // never one operation
  const float scale = high - low;
  if (scale < std::numeric_limits<float>::min()) return {0.0f, 0};
  const float inverse = 1.0f / scale;
  const int32_t zero = std::min(static_cast<int32_t>(std::nearbyint(-least * inverse)), 255);
  for (int64_t c = 0; c < k; ++c) {
    const auto rounded = static_cast<int64_t>(std::nearbyint(x[c] * inverse)) + zero;
    (*q)[static_cast<size_t>(c)] = std::clamp<int64_t>(rounded, 0, 255);
  }
  return {scale, zero};
}

void check(const std::vector<float>& x, int64_t x_stride, const std::vector<int8_t>& weight, int64_t num_rows,
           int64_t num_columns, int64_t k, bool has_bias) {
  Values values(14);
  const Packed packed(weight, num_columns, k, values);
  const Weights part = packed.part(has_bias);
  const auto run = [&](int64_t first, int64_t rows, int num_threads) {
    std::vector<float> y(static_cast<size_t>(rows * num_columns), kNan);
    linear({x.data() + first * x_stride, x_stride}, &part, 1, {y.data(), num_columns}, rows, k, nullptr, num_threads);
    return y;
  };
  const std::vector<float> y = run(0, num_rows, 1);
  std::vector<int64_t> q;
  for (int64_t i = 0; i < num_rows; ++i) {
    const Int8Row row = expected_row(x.data() + i * x_stride, k, &q);
    for (int64_t j = 0; j < num_columns; ++j) {
      int64_t sum = 0;
      for (int64_t c = 0; c < k; ++c) {
        sum += (q[static_cast<size_t>(c)] - row.zero) * weight[static_cast<size_t>(j * k + c)];
      }
      volatile float scale = row.scale * packed.scale[static_cast<size_t>(j)];
      volatile float expected = static_cast<float>(sum) * scale;
      if (has_bias) expected = expected + packed.bias[static_cast<size_t>(j)];
      const float actual = y[static_cast<size_t>(i * num_columns + j)];
      CHECK(actual == expected || (std::isnan(expected) && std::isnan(actual)));
    }
  }
  for (const int num_threads : {2, 3, 7}) {
    CHECK(same_bits(run(0, num_rows, num_threads).data(), y.data(), num_rows * num_columns));
  }
  for (int64_t first = 0; first < num_rows; first += 1 + num_rows / 7) {
    for (const int64_t rows : {int64_t{1}, int64_t{2}, num_rows - first}) {
      if (first + rows > num_rows) continue;
      CHECK(same_bits(run(first, rows, 1).data(), y.data() + first * num_columns, rows * num_columns));
    }
  }
}

// Rows of x lie farther apart than they are long, with NaN in between.
void test_shapes() {
  const int64_t shapes[][3] = {{1, 1, 1},     {5, 13, 7},    {33, 50, 100}, {200, 31, 65}, {16, 16, 64}, {17, 33, 63},
                               {32, 64, 128}, {450, 140, 9}, {3, 5, 0},     {0, 5, 4},     {5, 0, 4}};
  for (const auto& [num_rows, num_columns, k] : shapes) {
    Values values(15);
    std::vector<float> x = values.vector(num_rows * (k + 3), 3.0f, 0.5f);
    for (int64_t i = 0; i < num_rows; ++i) std::fill_n(x.begin() + i * (k + 3) + k, 3, kNan);
    for (const bool has_bias : {false, true}) {
      check(x, k + 3, bytes_of(num_columns * k, values), num_rows, num_columns, k, has_bias);
    }
  }
}

// The largest sums: pairs of products that do not fit into 16 bits, and all signs.
void test_extremes() {
  const int64_t k = 4096;
  std::vector<float> x(static_cast<size_t>(4 * k));
  for (int64_t c = 0; c < k; ++c) {
    x[static_cast<size_t>(c)] = 255.0f;
    x[static_cast<size_t>(k + c)] = -1.0f;
    x[static_cast<size_t>(2 * k + c)] = c % 2 == 0 ? 3e38f : -3e38f;
    x[static_cast<size_t>(3 * k + c)] = c % 64 == 63 ? 1e-30f : 0.0f;
  }
  std::vector<int8_t> weight(static_cast<size_t>(3 * k));
  for (int64_t c = 0; c < k; ++c) {
    weight[static_cast<size_t>(c)] = -127;
    weight[static_cast<size_t>(k + c)] = 127;
    weight[static_cast<size_t>(2 * k + c)] = c % 2 == 0 ? 127 : -128;
  }
  check(x, k, weight, 4, 3, k, true);
}

void test_rows_without_a_scale() {
  const int64_t k = 37;
  Values values(16);
  std::vector<float> x = values.vector(7 * k);
  x[5] = kNan;
  x[static_cast<size_t>(k + 36)] = kInfinity;
  x[static_cast<size_t>(2 * k)] = -kInfinity;
  std::fill_n(x.begin() + 3 * k, k, 0.0f);
  std::fill_n(x.begin() + 4 * k, k, -0.0f);
  std::fill_n(x.begin() + 5 * k, k, 1e-42f);  // scale would be no normal number
  check(x, k, bytes_of(20 * k, values), 7, 20, k, true);
}

// Parts side by side, with an activation, are the layers one by one.
void test_parts() {
  Values values(17);
  const int64_t num_rows = 230, k = 70, widths[] = {30, 1, 155};
  const std::vector<float> x = values.vector(num_rows * k);
  std::vector<Packed> packed;
  std::vector<Weights> parts;
  int64_t all = 0;
  for (const int64_t width : widths) {
    packed.emplace_back(bytes_of(width * k, values), width, k, values);
    all += width;
  }
  for (size_t i = 0; i < 3; ++i) parts.push_back(packed[i].part(i != 1));
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
  Values values(18);
  const std::vector<float> x(12);
  const Packed packed(bytes_of(12, values), 3, 4, values);
  std::vector<float> y(9);
  const Weights part = packed.part(false);
  const auto run = [&](const float* from, const Weights& weights, float* to, int64_t rows, int64_t k) {
    linear_int8({from, 4}, &weights, 1, {to, 3}, rows, k, nullptr, 1);
  };
  Weights wrong = part;
  wrong.int8.packed = nullptr;
  CHECK(throws_invalid_argument([&] { run(x.data(), wrong, y.data(), 3, 4); }));
  wrong = part;
  wrong.int8.scale = nullptr;
  CHECK(throws_invalid_argument([&] { run(x.data(), wrong, y.data(), 3, 4); }));
  wrong = part;
  wrong.int8.sums = nullptr;
  CHECK(throws_invalid_argument([&] { run(x.data(), wrong, y.data(), 3, 4); }));
  CHECK(throws_invalid_argument([&] { run(nullptr, part, y.data(), 3, 4); }));
  CHECK(throws_invalid_argument([&] { run(x.data(), part, nullptr, 3, 4); }));
  CHECK(throws_invalid_argument([&] { run(x.data(), part, y.data(), -1, 4); }));
  CHECK(throws_invalid_argument([&] { run(x.data(), part, y.data(), 3, kMaxInt8Features + 1); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  const auto test = [] {
    test_shapes();
    test_extremes();
    test_rows_without_a_scale();
    test_parts();
    test_bad_input();
  };
  for_every_level(test, true);
  return 0;
}
