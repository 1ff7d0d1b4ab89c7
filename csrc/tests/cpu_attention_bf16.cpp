// Attention in bf16 against fp64 with rounded inputs, on exactly sized buffers; a sequence has the same bits alone,
// among others and by any number of threads, and what is not finite stays in its sequence.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/attention_bf16.h"
#include "cpu/linear_bf16.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

std::vector<double> rounded(const std::vector<float>& values) {
  const auto count = static_cast<int64_t>(values.size());
  std::vector<Bf16> all(static_cast<size_t>(bf16_padded(count)));
  bf16_kernels().round(values.data(), count, all.data());
  std::vector<float> made(values.size());
  widen(all.data(), count, made.data());
  return {made.begin(), made.end()};
}

// Of each sequence the last queries are wanted, or all: [token, head, d] each, q, k and v beside one another.
struct Batch {
  Batch(const std::vector<int32_t>& lengths, int64_t most_queries, int64_t num_heads, int64_t head_dim, uint32_t seed)
      : heads(num_heads), d(head_dim), width(num_heads * head_dim), cu_q{0}, cu_k{0} {
    for (const int32_t length : lengths) {
      cu_k.push_back(cu_k.back() + length);
      cu_q.push_back(cu_q.back() + static_cast<int32_t>(std::min<int64_t>(length, most_queries)));
    }
    Values values(seed);
    q = values.vector(cu_q.back() * width, 2.0f, 0.3f);
    kv = values.vector(cu_k.back() * 2 * width, 2.0f, -0.2f);
  }
  Packed<const float> keys() const { return {kv.data(), 2 * width}; }
  Packed<const float> values() const { return {kv.data() + width, 2 * width}; }
  std::vector<float> run(size_t first, size_t count, int num_threads) const {
    std::vector<int32_t> of_q, of_k;
    for (size_t i = first; i <= first + count; ++i) {
      of_q.push_back(cu_q[i] - cu_q[first]);
      of_k.push_back(cu_k[i] - cu_k[first]);
    }
    std::vector<float> out(static_cast<size_t>(of_q.back() * width), std::numeric_limits<float>::quiet_NaN());
    const AttentionShape shape{of_q.data(), of_k.data(), static_cast<int64_t>(count),
                               of_q.back(), of_k.back(), heads,
                               d,           scale(),     of_q.back(),
                               {nullptr},   {nullptr},   false};
    const int64_t from = cu_k[first];
    attention_forward_bf16({q.data() + cu_q[first] * width, width}, {keys().data + from * 2 * width, 2 * width},
                           {values().data + from * 2 * width, 2 * width}, {out.data(), width}, shape, num_threads);
    return out;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(d)); }

  int64_t heads, d, width;
  std::vector<int32_t> cu_q, cu_k;
  std::vector<float> q, kv;
};

void check_values(const Batch& b, const std::vector<float>& out) {
  const std::vector<double> q = rounded(b.q), kv = rounded(b.kv);
  const auto key_at = [&](int64_t token, int64_t head) { return kv.data() + token * 2 * b.width + head * b.d; };
  for (size_t s = 0; s + 1 < b.cu_q.size(); ++s) {
    for (int64_t row = b.cu_q[s]; row < b.cu_q[s + 1]; ++row) {
      for (int64_t head = 0; head < b.heads; ++head) {
        std::vector<double> probs;
        double most = -1e30, sum = 0.0;
        for (int64_t key = b.cu_k[s]; key < b.cu_k[s + 1]; ++key) {
          double score = 0.0;
          for (int64_t c = 0; c < b.d; ++c) {
            score += q[static_cast<size_t>(row * b.width + head * b.d + c)] * key_at(key, head)[c];
          }
          probs.push_back(score * b.scale());
          most = std::max(most, probs.back());
        }
        for (double& prob : probs) sum += prob = std::exp(prob - most);
        for (int64_t c = 0; c < b.d; ++c) {
          double expected = 0.0, size = 0.0;
          for (size_t key = 0; key < probs.size(); ++key) {
            const double value = key_at(b.cu_k[s] + static_cast<int64_t>(key), head)[b.width + c];
            const double term = probs[key] / sum * value;
            expected += term;
            size += std::abs(term);
          }
          const double bound = size / 256.0 + 1e-5;  // what rounding the probabilities may do
          CHECK(std::abs(out[static_cast<size_t>(row * b.width + head * b.d + c)] - expected) <= bound);
        }
      }
    }
  }
}

void test_sequences() {
  const std::vector<int32_t> lengths = {1, 2, 15, 0, 16, 17, 33, 64, 65, 130, 1};
  const int64_t dims_and_queries[][2] = {{8, 1000}, {24, 1}, {32, 20}, {64, 1000}, {80, 20}};
  for (const auto& [d, most_queries] : dims_and_queries) {
    const Batch batch(lengths, most_queries, 2, d, static_cast<uint32_t>(d));
    const std::vector<float> out = batch.run(0, lengths.size(), 1);
    check_values(batch, out);
    for (const int num_threads : {2, 5}) {
      const std::vector<float> other = batch.run(0, lengths.size(), num_threads);
      CHECK(std::memcmp(out.data(), other.data(), out.size() * sizeof(float)) == 0);
    }
    for (size_t s = 0; s < lengths.size(); ++s) {
      const std::vector<float> alone = batch.run(s, 1, 1);
      CHECK(alone.empty() ||
            std::memcmp(out.data() + batch.cu_q[s] * batch.width, alone.data(), alone.size() * sizeof(float)) == 0);
    }
  }
}

void test_not_finite() {
  Batch batch({20, 40, 5}, 1000, 2, 32, 31);
  batch.kv[static_cast<size_t>(25 * 2 * batch.width)] = std::numeric_limits<float>::quiet_NaN();
  batch.kv[static_cast<size_t>(62 * 2 * batch.width + batch.width)] = std::numeric_limits<float>::infinity();
  const std::vector<float> out = batch.run(0, 3, 1);
  for (int64_t row = 0; row < 65; ++row) {
    const float first = out[static_cast<size_t>(row * batch.width)],
                second_head = out[static_cast<size_t>(row * batch.width + 32)];
    CHECK(std::isfinite(first) == (row < 20));
    CHECK(std::isfinite(second_head));
  }
}

// A product whose columns are its rows has the bits of the one that is not turned.
void test_turned_products() {
  const int64_t shapes[][3] = {{1, 1, 1}, {16, 16, 32}, {32, 32, 64}, {33, 64, 50}, {64, 33, 96}, {100, 75, 31}};
  for (const auto& [num_rows, num_columns, k] : shapes) {
    Values values(32);
    const int64_t padded = bf16_padded(k), columns = (num_columns + 15) / 16 * 16, stride = num_rows + 3;
    const std::vector<float> x = values.vector(num_rows * k), weight = values.vector(num_columns * k);
    std::vector<Bf16> packed(static_cast<size_t>((num_rows + 31) / 32 * 32 * padded));
    std::vector<Bf16> rows(static_cast<size_t>(columns * padded));
    bf16_kernels().pack(x.data(), k, num_rows, k, packed.data());
    for (int64_t j = 0; j < num_columns; ++j) {
      bf16_kernels().round(weight.data() + j * k, k, rows.data() + j * padded);
    }
    std::vector<float> y(static_cast<size_t>(num_rows * num_columns));
    std::vector<float> turned(static_cast<size_t>((num_columns - 1) * stride + num_rows), 7.0f);
    const auto tiles = [&, k_padded = padded](float* to, int64_t to_stride) {
      return Bf16Tiles{num_rows, num_columns, k_padded, packed.data(), rows.data(), k_padded, nullptr, to, to_stride};
    };
    bf16_kernels().linear(tiles(y.data(), num_columns));
    bf16_kernels().linear_turned(tiles(turned.data(), stride));
    for (size_t at = 0; at < turned.size(); ++at) {
      const auto place = static_cast<int64_t>(at), i = place % stride, j = place / stride;
      CHECK(turned[at] == (i < num_rows ? y[static_cast<size_t>(i * num_columns + j)] : 7.0f));
    }
  }
}

void test_bad_input() {
  const Batch batch({4}, 4, 2, 8, 33);
  std::vector<float> out(64);
  const auto run = [&](const float* q, const std::vector<int32_t>& offsets, float* to) {
    const AttentionShape shape{offsets.data(), offsets.data(), 1, 4, 4, 2, 8, 1.0f, 4, {nullptr}, {nullptr}, false};
    attention_forward_bf16({q, 16}, batch.keys(), batch.values(), {to, 16}, shape, 1);
  };
  run(batch.q.data(), {0, 4}, out.data());
  CHECK(throws_invalid_argument([&] { run(nullptr, {0, 4}, out.data()); }));
  CHECK(throws_invalid_argument([&] { run(batch.q.data(), {0, 5}, out.data()); }));
  CHECK(throws_invalid_argument([&] { run(batch.q.data(), {0, 4}, nullptr); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    if (!bert_fast::cpu::runs_attention_bf16()) return;
    test_sequences();
    test_not_finite();
    test_turned_products();
    test_bad_input();
  });
  return 0;
}
