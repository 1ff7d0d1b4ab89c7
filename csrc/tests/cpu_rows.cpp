// Layer norm and softmax with dropout against double-precision loops, on exactly sized buffers so that a sanitizer
// sees every access beyond a row; the same bits for every number of threads.

#include <algorithm>
#include <limits>

#include "cpu/layer_norm.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

// fp32 sums of at most 1000 values of size 1, as a share of the result.
constexpr double kBound = 5e-5;

std::vector<int32_t> token_coords(int64_t num_tokens) {
  std::vector<int32_t> coords;
  for (int64_t i = 0; i < num_tokens; ++i) {
    coords.push_back(static_cast<int32_t>(i / 7));
    coords.push_back(static_cast<int32_t>(i % 7));
  }
  return coords;
}

struct LayerNormRun {
  std::vector<float> y, h, mean, rstd, dresidual, dx, dx_bias, dweight, dbias;
};

// from_output: backward is given y, and neither h nor mean is there.
LayerNormRun run_layer_norm(int64_t num_rows, int64_t num_cols, const DropoutSpec& spec, int num_threads,
                            bool from_output) {
  Values values(3);
  const int64_t size = num_rows * num_cols;
  const std::vector<float> x = values.vector(size), residual = values.vector(size, 1.0f, -20.0f);
  const std::vector<float> x_bias = values.vector(num_cols), weight = values.vector(num_cols, 0.4f, -0.6f);
  const std::vector<float> bias = values.vector(num_cols), dy = values.vector(size);
  const std::vector<int32_t> coords = token_coords(num_rows);
  LayerNormRun run;
  for (std::vector<float>* rows : {&run.y, &run.dresidual, &run.dx}) rows->resize(x.size());
  run.rstd.resize(static_cast<size_t>(num_rows));
  if (!from_output) {
    run.h.resize(x.size());
    run.mean.resize(static_cast<size_t>(num_rows));
  }
  for (std::vector<float>* columns : {&run.dx_bias, &run.dweight, &run.dbias}) columns->resize(x_bias.size());
  dropout_add_layer_norm_forward({x.data(), x_bias.data(), residual.data(), weight.data(), bias.data(), run.y.data(),
                                  from_output ? nullptr : run.h.data(), from_output ? nullptr : run.mean.data(),
                                  run.rstd.data(), num_rows, num_cols, 1e-12f},
                                 coords.data(), spec, num_threads);
  dropout_add_layer_norm_backward(
      {dy.data(), from_output ? run.y.data() : run.h.data(), from_output ? nullptr : run.mean.data(), run.rstd.data(),
       weight.data(), from_output ? bias.data() : nullptr, run.dresidual.data(), run.dx.data(), run.dx_bias.data(),
       run.dweight.data(), run.dbias.data(), num_rows, num_cols},
      coords.data(), spec, num_threads);

  std::vector<double> dweight(x_bias.size()), dbias(x_bias.size()), dx_bias(x_bias.size());
  for (int64_t i = 0; i < num_rows; ++i) {
    const double n = static_cast<double>(num_cols);
    std::vector<double> h(x_bias.size());
    std::vector<bool> keep(x_bias.size());
    double mean = 0.0, variance = 0.0, mean_g = 0.0, mean_gn = 0.0;
    const size_t row = static_cast<size_t>(i * num_cols);
    for (size_t c = 0; c < h.size(); ++c) {
      keep[c] = kept(spec, static_cast<uint32_t>(i / 7), static_cast<uint32_t>(i % 7), static_cast<uint32_t>(c));
      h[c] = residual[row + c] + (keep[c] ? (double{x[row + c]} + x_bias[c]) * spec.scale : 0.0);
      mean += h[c] / n;
    }
    for (const double value : h) variance += (value - mean) * (value - mean) / n;
    const double rstd = 1.0 / std::sqrt(variance + 1e-12);
    if (!from_output) CHECK(is_close(run.mean[static_cast<size_t>(i)], mean, 1e-6));
    CHECK(is_close(run.rstd[static_cast<size_t>(i)], rstd, kBound));
    for (size_t c = 0; c < h.size(); ++c) {
      const double normalized = (h[c] - mean) * rstd, g = double{dy[row + c]} * weight[c];
      if (!from_output) CHECK(is_close(run.h[row + c], h[c], 1e-6));
      CHECK(is_close(run.y[row + c], normalized * weight[c] + bias[c], kBound));
      dweight[c] += dy[row + c] * normalized;
      dbias[c] += dy[row + c];
      mean_g += g / n;
      mean_gn += g * normalized / n;
    }
    for (size_t c = 0; c < h.size(); ++c) {
      const double g = double{dy[row + c]} * weight[c];
      const double dresidual = rstd * (g - mean_g - (h[c] - mean) * rstd * mean_gn);
      const double dx = keep[c] ? dresidual * spec.scale : 0.0;
      CHECK(is_close(run.dresidual[row + c], dresidual, kBound));
      CHECK(is_close(run.dx[row + c], dx, kBound));
      dx_bias[c] += dx;
    }
  }
  for (size_t c = 0; c < dbias.size(); ++c) {
    CHECK(is_close(run.dweight[c], dweight[c], kBound));
    CHECK(is_close(run.dbias[c], dbias[c], kBound));
    CHECK(is_close(run.dx_bias[c], dx_bias[c], kBound));
  }
  return run;
}

void test_layer_norm() {
  for (const uint32_t threshold : {0u, 6554u}) {
    const DropoutSpec spec{42, 3, threshold, 65536.0f / static_cast<float>(65536 - threshold)};
    for (const bool from_output : {false, true}) {
      for (const int64_t num_cols : {2, 7, 16, 31, 65, 384}) run_layer_norm(5, num_cols, spec, 1, from_output);
      const LayerNormRun one = run_layer_norm(300, 300, spec, 1, from_output);
      const LayerNormRun three = run_layer_norm(300, 300, spec, 3, from_output);
      CHECK(one.y == three.y && one.dx == three.dx);
      CHECK(one.dx_bias == three.dx_bias && one.dweight == three.dweight && one.dbias == three.dbias);
    }
  }
}

// One column outside the limits, wherever it stands, or a NaN says no.
void test_output_suffices() {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const int64_t num_cols : {1, 5, 33}) {
    for (int64_t column = 0; column < num_cols; ++column) {
      const auto suffices = [&](float weight_at_column, float bias_at_column) {
        std::vector<float> weight(static_cast<size_t>(num_cols), -0.7f), bias(weight.size(), 0.2f);
        weight[static_cast<size_t>(column)] = weight_at_column;
        bias[static_cast<size_t>(column)] = bias_at_column;
        return output_suffices(weight.data(), bias.data(), num_cols, 0.25f, 4.0f, 2.0f);
      };
      CHECK(suffices(0.25f, 0.5f) && suffices(-0.25f, -0.5f) && suffices(4.0f, 0.0f) && suffices(-1.0f, 2.0f));
      for (const float weight : {0.0f, -0.0f, 0.2f, -0.2f, 4.1f, inf, -inf, nan}) CHECK(!suffices(weight, 0.0f));
      for (const float bias : {2.1f, -2.1f, inf, -inf, nan}) CHECK(!suffices(1.0f, bias));
    }
  }
  CHECK(output_suffices(nullptr, nullptr, 0, 0.25f, 4.0f, 2.0f));
}

// Rows exactly as long as their width, with real keys in front and padding, poisoned, behind.
void test_softmax(int64_t num_keys, int64_t width, uint32_t threshold, float largest_score) {
  const DropoutSpec spec{5, 1, threshold, 65536.0f / static_cast<float>(65536 - threshold)};
  const float softmax_scale = 0.125f;
  std::vector<uint8_t> bits(static_cast<size_t>(keep_bits_bytes(width)));
  kernels().keep_bits(spec, 2, 7, 0, (width + 7) / 8, bits.data());
  const SoftmaxRow row{num_keys, width, softmax_scale, spec.active() ? bits.data() : nullptr, spec.scale};
  Values values(4);
  std::vector<float> scores = values.vector(width, largest_score), dp = values.vector(width);
  for (size_t c = static_cast<size_t>(num_keys); c < scores.size(); ++c) {
    scores[c] = dp[c] = std::numeric_limits<float>::quiet_NaN();
  }
  std::vector<float> dropped = scores, recomputed = scores, ds = dp;
  const float lse = kernels().softmax_forward(dropped.data(), row);
  kernels().softmax_backward(recomputed.data(), ds.data(), lse, row);

  double sum = 0.0, largest = -std::numeric_limits<double>::infinity();
  for (size_t c = 0; c < static_cast<size_t>(num_keys); ++c) {
    largest = std::max(largest, double{softmax_scale} * scores[c]);
  }
  for (size_t c = 0; c < static_cast<size_t>(num_keys); ++c) {
    sum += std::exp(double{softmax_scale} * scores[c] - largest);
  }
  if (num_keys == 0) {
    CHECK(lse == -std::numeric_limits<float>::infinity());
  } else {
    CHECK(is_close(lse, largest + std::log(sum), 1e-6));
  }
  double delta = 0.0;
  for (size_t c = 0; c < static_cast<size_t>(num_keys); ++c) {
    const double p = std::exp(double{softmax_scale} * scores[c] - largest) / sum;
    if (kept(spec, 2, 7, static_cast<uint32_t>(c))) delta += p * dp[c] * spec.scale;
  }
  if (num_keys == 1) CHECK(ds[0] == 0.0f);  // P is exactly 1: scaling by a power of two does not round
  for (size_t c = 0; c < scores.size(); ++c) {
    if (c >= static_cast<size_t>(num_keys)) {
      CHECK(dropped[c] == 0.0f && recomputed[c] == 0.0f && ds[c] == 0.0f);
      continue;
    }
    const double p = std::exp(double{softmax_scale} * scores[c] - largest) / sum;
    const bool keep = kept(spec, 2, 7, static_cast<uint32_t>(c));
    if (p > 1e-30) CHECK((dropped[c] != 0.0f) == keep);
    // Relative to P itself, however small: the exponential has no error of its own beyond its last place, but it passes
    // on the rounding of its argument, whose magnitude is up to 2 * softmax_scale * largest_score.
    const double bound = 1e-6 + 2e-7 * softmax_scale * largest_score;
    const double expected = keep ? p * spec.scale : 0.0;
    if (p > 1e-30) CHECK(std::abs(dropped[c] - expected) <= bound * expected);
    if (p > 1e-30) CHECK(std::abs(recomputed[c] - expected) <= bound * expected);
    const double kept_dp = keep ? double{dp[c]} * spec.scale : 0.0;
    // 1e-37: what would be subnormal is 0.
    CHECK(std::abs(ds[c] - softmax_scale * p * (kept_dp - delta)) <= bound * p + 1e-37);
  }
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    test_layer_norm();
    test_output_suffices();
    for (const int64_t num_keys : {0, 1, 5, 8, 15, 16, 17, 37, 64}) {
      for (const uint32_t threshold : {0u, 6554u}) {
        for (const float largest_score : {1.0f, 30.0f, 600.0f}) {
          for (const int64_t padding : {0, 3, 16}) {
            if (num_keys + padding > 0) test_softmax(num_keys, num_keys + padding, threshold, largest_score);
          }
        }
      }
    }
  });
  return 0;
}
