// Linear layers and whole layers against double-precision loops, on exactly sized buffers so that a sanitizer sees
// every access beyond a row; a row has the same bits alone, among others and by any number of threads.

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/attention.h"
#include "cpu/encoder_layer.h"
#include "cpu/layer_norm.h"
#include "cpu/linear.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

bool same_bits(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// Rows of x and of weights lie farther apart than they are long, with NaN in between.
void test_linear(int64_t num_rows, int64_t num_columns, int64_t k, bool has_bias) {
  Values values(11);
  const int64_t x_stride = k + 3, weight_stride = k + 1;
  std::vector<float> x = values.vector(num_rows * x_stride), weight = values.vector(num_columns * weight_stride);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < num_rows; ++i) std::fill_n(x.begin() + i * x_stride + k, 3, nan);
  for (int64_t j = 0; j < num_columns; ++j) weight[static_cast<size_t>(j * weight_stride + k)] = nan;
  const std::vector<float> bias = values.vector(num_columns);
  const Weights part{weight.data(), weight_stride, has_bias ? bias.data() : nullptr, num_columns};
  const auto run = [&](int64_t first, int64_t rows, int num_threads) {
    std::vector<float> y(static_cast<size_t>(rows * num_columns), nan);
    linear({x.data() + first * x_stride, x_stride}, &part, 1, {y.data(), num_columns}, rows, k, nullptr, num_threads);
    return y;
  };
  const std::vector<float> y = run(0, num_rows, 1);
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) {
      double sum = has_bias ? bias[static_cast<size_t>(j)] : 0.0;
      for (int64_t c = 0; c < k; ++c) {
        sum += double{x[static_cast<size_t>(i * x_stride + c)]} * weight[static_cast<size_t>(j * weight_stride + c)];
      }
      CHECK(is_close(y[static_cast<size_t>(i * num_columns + j)], sum, 2e-5));
    }
  }
  for (const int num_threads : {2, 3, 7})
    CHECK(same_bits(run(0, num_rows, num_threads).data(), y.data(), num_rows * num_columns));
  for (int64_t first = 0; first < num_rows; first += 1 + num_rows / 7) {
    for (const int64_t rows : {int64_t{1}, int64_t{2}, num_rows - first}) {
      if (first + rows > num_rows) continue;
      CHECK(same_bits(run(first, rows, 1).data(), y.data() + first * num_columns, rows * num_columns));
    }
  }
}

// Parts side by side are the layers one by one.
void test_parts() {
  Values values(12);
  const int64_t num_rows = 101, k = 70, widths[] = {30, 1, 55};
  const std::vector<float> x = values.vector(num_rows * k);
  std::vector<std::vector<float>> weights, biases;
  std::vector<Weights> parts;
  int64_t all = 0;
  for (const int64_t width : widths) {
    weights.push_back(values.vector(width * k));
    biases.push_back(values.vector(width));
    all += width;
  }
  for (size_t i = 0; i < 3; ++i)
    parts.push_back({weights[i].data(), k, i == 1 ? nullptr : biases[i].data(), widths[i]});
  std::vector<float> y(static_cast<size_t>(num_rows * all));
  linear({x.data(), k}, parts.data(), 3, {y.data(), all}, num_rows, k, nullptr, 2);
  int64_t first = 0;
  for (const Weights& part : parts) {
    std::vector<float> alone(static_cast<size_t>(num_rows * part.num_columns));
    linear({x.data(), k}, &part, 1, {alone.data(), part.num_columns}, num_rows, k, nullptr, 1);
    for (int64_t i = 0; i < num_rows; ++i) {
      CHECK(same_bits(y.data() + i * all + first, alone.data() + i * part.num_columns, part.num_columns));
    }
    first += part.num_columns;
  }
}

double expected_activation(double x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
  }
  return 0.0;
}

void test_activations() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Activation activation : {Activation::kGelu, Activation::kGeluTanh, Activation::kRelu, Activation::kSilu}) {
    std::vector<float> x;
    for (int i = -6000; i <= 6000; ++i) x.push_back(static_cast<float>(i) / 1000.0f);
    for (const float far : {-1e30f, -200.0f, -50.0f, -11.0f, -1e-30f, 0.0f, 1e-30f, 50.0f, 1e30f}) x.push_back(far);
    std::vector<float> y(x.size());
    activate(y.data(), x.data(), static_cast<int64_t>(x.size()), activation, 2);
    for (size_t i = 0; i < x.size(); ++i) {
      // Relative, with what rounding of an exponent costs, which grows as x^2 does; of subnormal results nothing is
      // left.
      const double expected = expected_activation(x[i], activation), square = double{x[i]} * x[i];
      CHECK(std::abs(y[i] - expected) <= (5e-7 + 2e-7 * std::min(square, 200.0)) * std::abs(expected) + 1e-36);
    }
    // The last few columns, and in place.
    for (int64_t count = 0; count < 40; ++count) {
      std::vector<float> few(x.begin() + 4000, x.begin() + 4000 + count);
      activate(few.data(), few.data(), count, activation, 1);
      CHECK(same_bits(few.data(), y.data() + 4000, count));
    }
    const float special[] = {infinity, std::numeric_limits<float>::quiet_NaN()};
    float made[2];
    activate(made, special, 2, activation, 1);
    CHECK(made[0] == infinity && made[1] != made[1]);
  }
}

// Layers in a row against the routines that they consist of.
void test_encoder_layers(bool causal, bool has_rows) {
  Values values(13);
  const int64_t hidden = 24, width = 30, heads = 3, wide = 50, tokens = 41;
  const std::vector<int32_t> cu_k = {0, 17, 17, 18, 41};
  const std::vector<int64_t> rows = {0, 5, 17, 18, 40};
  const std::vector<int32_t> cu_rows = {0, 2, 2, 3, 5};
  std::vector<int32_t> coords;
  for (int32_t i = 0; i < tokens; ++i) coords.insert(coords.end(), {i / 41, i});
  std::vector<int32_t> coords_of_rows;
  for (const int64_t row : rows) {
    coords_of_rows.insert(coords_of_rows.end(), {0, static_cast<int32_t>(row)});
  }
  std::vector<std::vector<float>> memory;
  const auto fresh = [&](int64_t size) {
    memory.push_back(values.vector(size, 0.5f));
    return memory.back().data();
  };
  memory.reserve(100);
  std::vector<EncoderLayer> layers;
  for (int i = 0; i < 3; ++i) {
    const auto weights = [&](int64_t n, int64_t k) { return Weights{fresh(n * k), k, fresh(n), n}; };
    const auto norm = [&] { return NormWeights{fresh(hidden), fresh(hidden), 1e-12f}; };
    EncoderLayer layer{weights(width, hidden),
                       weights(width, hidden),
                       weights(width, hidden),
                       weights(hidden, width),
                       norm(),
                       weights(wide, hidden),
                       weights(hidden, wide),
                       norm(),
                       heads,
                       causal,
                       Activation::kGelu};
    if (i == 1) layer.query.bias = layer.up.bias = layer.down.bias = nullptr;
    layers.push_back(layer);
  }
  const std::vector<float> x = values.vector(tokens * hidden);
  const int64_t queries = has_rows ? static_cast<int64_t>(rows.size()) : tokens;
  const PackedBatch batch{has_rows ? rows.data() : nullptr,
                          has_rows ? cu_rows.data() : cu_k.data(),
                          cu_k.data(),
                          has_rows ? coords_of_rows.data() : coords.data(),
                          coords.data(),
                          4,
                          queries,
                          tokens,
                          hidden};
  const auto run = [&](int num_threads) {
    std::vector<float> y(static_cast<size_t>(queries * hidden));
    encoder_layers(x.data(), y.data(), layers.data(), layers.size(), batch, num_threads);
    return y;
  };
  const std::vector<float> y = run(1);
  CHECK(same_bits(run(4).data(), y.data(), queries * hidden));

  std::vector<float> state = x;  // all tokens of every layer; the rows are picked at the end
  for (const EncoderLayer& layer : layers) {
    std::vector<float> q(static_cast<size_t>(tokens * width)), k = q, v = q, out = q;
    std::vector<float> lse(static_cast<size_t>(tokens * heads)), z = state, next = state;
    std::vector<float> between(static_cast<size_t>(tokens * wide));
    linear({state.data(), hidden}, &layer.query, 1, {q.data(), width}, tokens, hidden, nullptr, 1);
    linear({state.data(), hidden}, &layer.key, 1, {k.data(), width}, tokens, hidden, nullptr, 1);
    linear({state.data(), hidden}, &layer.value, 1, {v.data(), width}, tokens, hidden, nullptr, 1);
    attention_forward(
        {q.data(), width}, {k.data(), width}, {v.data(), width}, {out.data(), width}, lse.data(),
        {cu_k.data(), cu_k.data(), 4, tokens, tokens, heads, width / heads, static_cast<float>(1.0 / std::sqrt(10.0)),
         tokens, Coords{coords.data()}, Coords{coords.data()}, causal},
        DropoutSpec{}, 1);
    Weights attention_output = layer.attention_output, down = layer.down;
    attention_output.bias = down.bias = nullptr;
    linear({out.data(), width}, &attention_output, 1, {z.data(), hidden}, tokens, width, nullptr, 1);
    dropout_add_layer_norm_forward(
        {z.data(), layer.attention_output.bias, state.data(), layer.attention_norm.weight, layer.attention_norm.bias,
         z.data(), nullptr, nullptr, nullptr, tokens, hidden, 1e-12f},
        nullptr, DropoutSpec{}, 1);
    linear({z.data(), hidden}, &layer.up, 1, {between.data(), wide}, tokens, hidden, nullptr, 1);
    activate(between.data(), between.data(), tokens * wide, layer.activation, 1);
    linear({between.data(), wide}, &down, 1, {next.data(), hidden}, tokens, wide, nullptr, 1);
    dropout_add_layer_norm_forward({next.data(), layer.down.bias, z.data(), layer.norm.weight, layer.norm.bias,
                                    next.data(), nullptr, nullptr, nullptr, tokens, hidden, 1e-12f},
                                   nullptr, DropoutSpec{}, 1);
    state = next;
  }
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t token = has_rows ? rows[static_cast<size_t>(i)] : i;
    CHECK(same_bits(y.data() + i * hidden, state.data() + token * hidden, hidden));
  }

  EncoderLayer other = layers[0];
  other.num_heads = 4;
  CHECK(throws_invalid_argument([&] { encoder_layers(x.data(), state.data(), &other, 1, batch, 1); }));
  other = layers[0];
  other.key.num_columns = width - 1;
  CHECK(throws_invalid_argument([&] { encoder_layers(x.data(), state.data(), &other, 1, batch, 1); }));
  if (has_rows) {
    const std::vector<int64_t> wrong = {0, 5, 17, 18, 41};
    PackedBatch of_wrong = batch;
    of_wrong.rows = wrong.data();
    CHECK(throws_invalid_argument([&] { encoder_layers(x.data(), state.data(), layers.data(), 3, of_wrong, 1); }));
  }
}

void test_bad_input() {
  const std::vector<float> x(12), weight(12);
  std::vector<float> y(9);
  const Weights part{weight.data(), 4, nullptr, 3}, missing{nullptr, 4, nullptr, 3};
  CHECK(throws_invalid_argument([&] { linear({x.data(), 4}, &missing, 1, {y.data(), 3}, 3, 4, nullptr, 1); }));
  CHECK(throws_invalid_argument([&] { linear({nullptr, 4}, &part, 1, {y.data(), 3}, 3, 4, nullptr, 1); }));
  CHECK(throws_invalid_argument([&] { linear({x.data(), 4}, &part, 1, {nullptr, 3}, 3, 4, nullptr, 1); }));
  CHECK(throws_invalid_argument([&] { linear({x.data(), 4}, &part, 1, {y.data(), 3}, -1, 4, nullptr, 1); }));
  CHECK(throws_invalid_argument([&] { activation_of("GELU"); }));
  CHECK(throws_invalid_argument([&] { activate(nullptr, x.data(), 3, Activation::kRelu, 1); }));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    for (const bool has_bias : {false, true}) {
      test_linear(1, 1, 1, has_bias);
      test_linear(5, 13, 7, has_bias);
      test_linear(97, 50, 100, has_bias);
      test_linear(200, 31, 65, has_bias);
      test_linear(9, 12, 1601, has_bias);
      test_linear(3, 5, 0, has_bias);
      test_linear(0, 5, 4, has_bias);
      test_linear(5, 0, 4, has_bias);
    }
    test_parts();
    test_activations();
    for (const bool causal : {false, true}) {
      for (const bool has_rows : {false, true}) test_encoder_layers(causal, has_rows);
    }
    test_bad_input();
  });
  return 0;
}
