// Layer norm and softmax with dropout against double-precision loops, on exactly sized buffers so that a sanitizer
// sees every access beyond a row; the same bits for every number of threads.

#include <algorithm>
#include <limits>

#include "dropout/layer_norm.h"
#include "dropout/softmax_dropout.h"
#include "dropout_check.h"

namespace bert_fast::dropout::testing {
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

LayerNormRun run_layer_norm(int64_t num_rows, int64_t num_cols, const DropoutSpec& spec, int num_threads) {
  Values values(3);
  const int64_t size = num_rows * num_cols;
  const std::vector<float> x = values.vector(size), residual = values.vector(size, 1.0f, -20.0f);
  const std::vector<float> x_bias = values.vector(num_cols), weight = values.vector(num_cols);
  const std::vector<float> bias = values.vector(num_cols), dy = values.vector(size);
  const std::vector<int32_t> coords = token_coords(num_rows);
  LayerNormRun run;
  for (std::vector<float>* rows : {&run.y, &run.h, &run.dresidual, &run.dx}) rows->resize(x.size());
  for (std::vector<float>* rows : {&run.mean, &run.rstd}) rows->resize(static_cast<size_t>(num_rows));
  for (std::vector<float>* columns : {&run.dx_bias, &run.dweight, &run.dbias}) columns->resize(x_bias.size());
  dropout_add_layer_norm_forward({x.data(), x_bias.data(), residual.data(), weight.data(), bias.data(), run.y.data(),
                                  run.h.data(), run.mean.data(), run.rstd.data(), num_rows, num_cols, 1e-12f},
                                 coords.data(), spec, num_threads);
  dropout_add_layer_norm_backward(
      {dy.data(), run.h.data(), run.mean.data(), run.rstd.data(), weight.data(), run.dresidual.data(), run.dx.data(),
       run.dx_bias.data(), run.dweight.data(), run.dbias.data(), num_rows, num_cols},
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
    CHECK(is_close(run.mean[static_cast<size_t>(i)], mean, 1e-6));
    CHECK(is_close(run.rstd[static_cast<size_t>(i)], rstd, kBound));
    for (size_t c = 0; c < h.size(); ++c) {
      const double normalized = (h[c] - mean) * rstd, g = double{dy[row + c]} * weight[c];
      CHECK(is_close(run.h[row + c], h[c], 1e-6));
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
    for (const int64_t num_cols : {2, 7, 16, 31, 65, 384}) run_layer_norm(5, num_cols, spec, 1);
    const LayerNormRun one = run_layer_norm(300, 300, spec, 1), three = run_layer_norm(300, 300, spec, 3);
    CHECK(one.y == three.y && one.dx == three.dx);
    CHECK(one.dx_bias == three.dx_bias && one.dweight == three.dweight && one.dbias == three.dbias);
  }
}

void test_softmax(bool causal, uint32_t threshold, int32_t first_position) {
  const DropoutSpec spec{5, 1, threshold, 65536.0f / static_cast<float>(65536 - threshold)};
  const int64_t n = 3, num_heads = 2, max_q = 37, max_k = 41, num_tokens = 60;
  const int32_t starts[n] = {1, 38, 38}, lens_q[n] = {37, 0, 17}, lens_k[n] = {37, 3, 19};
  std::vector<int32_t> coords(static_cast<size_t>(2 * num_tokens), -1);
  for (const int i : {0, 2}) {
    for (int32_t c = 0; c < std::max(lens_q[i], lens_k[i]); ++c) {
      coords[static_cast<size_t>(2 * (starts[i] + c))] = i;
      coords[static_cast<size_t>(2 * (starts[i] + c) + 1)] = c + first_position;
    }
  }
  const float softmax_scale = 0.125f;
  const ScoreGroup group{n,
                         num_heads,
                         max_q,
                         max_k,
                         starts,
                         lens_q,
                         starts,
                         lens_k,
                         num_tokens,
                         softmax_scale,
                         Coords{coords.data()},
                         Coords{coords.data()},
                         causal};
  Values values(4);
  const std::vector<float> scores = values.vector(n * num_heads * max_q * max_k, 30.0f);
  const std::vector<float> dp = values.vector(n * num_heads * max_q * max_k);
  const std::vector<float> delta = values.vector(num_heads * num_tokens);
  std::vector<float> dropped = scores, recomputed = scores, ds = dp, lse(delta.size());
  softmax_dropout_forward(dropped.data(), lse.data(), group, spec, 2);
  softmax_dropout_backward(recomputed.data(), ds.data(), lse.data(), delta.data(), group, spec, 2);

  size_t element = 0;
  for (int64_t row = 0; row < n * num_heads * max_q; ++row) {
    const int64_t q = row % max_q, head = row / max_q % num_heads, i = row / max_q / num_heads;
    const bool real = q < lens_q[i];
    const int64_t visible = !real ? 0 : causal ? std::min<int64_t>(q + 1, lens_k[i]) : lens_k[i];
    double sum = 0.0;
    for (int64_t c = 0; c < visible; ++c)
      sum += std::exp(double{softmax_scale} * scores[element + static_cast<size_t>(c)]);
    const size_t statistic = static_cast<size_t>(head * num_tokens + starts[i] + q);
    if (real) CHECK(is_close(lse[statistic], std::log(sum), 1e-6));
    for (int64_t c = 0; c < max_k; ++c, ++element) {
      if (c >= visible) {
        CHECK(dropped[element] == 0.0f && recomputed[element] == 0.0f && ds[element] == 0.0f);
        continue;
      }
      const double p = std::exp(double{softmax_scale} * scores[element]) / sum;
      const uint32_t column = static_cast<uint32_t>(head * 65536 + c + first_position);
      const bool keep = kept(spec, static_cast<uint32_t>(i), static_cast<uint32_t>(q + first_position), column);
      CHECK((dropped[element] != 0.0f) == keep);
      CHECK(is_close(dropped[element], keep ? p * spec.scale : 0.0, 1e-6));
      CHECK(is_close(recomputed[element], keep ? p * spec.scale : 0.0, 2e-6));
      const double kept_dp = keep ? double{dp[element]} * spec.scale : 0.0;
      CHECK(is_close(ds[element], softmax_scale * p * (kept_dp - delta[statistic]), 1e-6));
    }
  }
}

void test_softmax_without_keys() {
  const int32_t starts[1] = {0}, lens_q[1] = {2}, lens_k[1] = {0};
  float lse[2] = {1.0f, 1.0f};
  const ScoreGroup group{1, 1, 2, 0, starts, lens_q, starts, lens_k, 2, 1.0f, Coords{nullptr}, Coords{nullptr}, false};
  softmax_dropout_forward(nullptr, lse, group, DropoutSpec{}, 2);
  CHECK(lse[0] == -std::numeric_limits<float>::infinity() && lse[1] == lse[0]);
}

}  // namespace
}  // namespace bert_fast::dropout::testing

int main() {
  using namespace bert_fast::dropout::testing;
  for_every_level([] {
    test_layer_norm();
    for (const bool causal : {false, true}) {
      for (const uint32_t threshold : {0u, 6554u}) {
        for (const int first_position : {0, 8, 21}) test_softmax(causal, threshold, first_position);
      }
    }
    test_softmax_without_keys();
  });
  return 0;
}
