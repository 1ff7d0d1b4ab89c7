#include "cpu/layer_norm.h"

#include <cmath>
#include <vector>

#include "cpu/keep_bits.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// 64 pieces keep 64 cores busy; at least 32 rows each, so that adding the pieces up costs little.
int64_t num_row_pieces(int64_t num_rows) { return std::clamp<int64_t>(num_rows / 32, 1, 64); }

}  // namespace

void dropout_add_layer_norm_forward(const LayerNormForward& args, const int32_t* coords, const DropoutSpec& spec,
                                    int num_threads) {
  require_shape(args.num_rows, args.num_cols);
  require_coords(spec, coords, args.num_rows);
  const Kernels& k = kernels();
  const int64_t n = args.num_cols, num_elements = args.num_rows * n;
  require_address("x", args.x, num_elements);
  require_address("residual", args.residual, num_elements);
  require_address("weight", args.weight, num_elements);
  require_address("bias", args.bias, num_elements);
  require_address("y", args.y, num_elements);
  split_range(args.num_rows, useful_threads(args.num_rows * n, num_threads), [&](int64_t begin, int64_t end) {
    TokenKeepBits bits(k, spec, coords, n);
    for (int64_t i = begin; i < end; ++i) {
      float* y = args.y + i * n;
      float* h = args.h == nullptr ? y : args.h + i * n;
      const LayerNormStatistics statistics =
          k.layer_norm_forward({args.x + i * n, args.x_bias, args.residual + i * n, args.weight, args.bias, h, y,
                                bits.draw(i), spec.scale, args.eps},
                               n);
      if (args.mean != nullptr) args.mean[i] = statistics.mean;
      if (args.rstd != nullptr) args.rstd[i] = statistics.rstd;
    }
  });
}

bool output_suffices(const float* weight, const float* bias, int64_t num_cols, float min_weight, float max_weight,
                     float max_shift) {
  require_address("weight", weight, num_cols);
  require_address("bias", bias, num_cols);
  for (int64_t c = 0; c < num_cols; ++c) {
    const float size = std::abs(weight[c]), shift = std::abs(bias[c]);
    if (!(size >= min_weight && size <= max_weight && shift <= max_shift * size)) return false;  // NaN fails, too
  }
  return true;
}

void dropout_add_layer_norm_backward(const LayerNormBackward& args, const int32_t* coords, const DropoutSpec& spec,
                                     int num_threads) {
  require_shape(args.num_rows, args.num_cols);
  require_coords(spec, coords, args.num_rows);
  const Kernels& k = kernels();
  const int64_t n = args.num_cols, num_pieces = num_row_pieces(args.num_rows), num_elements = args.num_rows * n;
  require_address("dy", args.dy, num_elements);
  require_address("kept", args.kept, num_elements);
  require_address("rstd", args.rstd, args.num_rows);
  require_address("mean", args.mean, args.bias == nullptr ? args.num_rows : 0);
  require_address("weight", args.weight, args.bias == nullptr ? num_elements : n);  // inverted below, rows or not
  require_address("dresidual", args.dresidual, num_elements);
  std::vector<float> inverse(args.bias == nullptr ? 0 : static_cast<size_t>(n));
  for (size_t c = 0; c < inverse.size(); ++c) inverse[c] = 1.0f / args.weight[c];
  std::vector<float> sums(static_cast<size_t>(3 * n * num_pieces), 0.0f);  // [num_pieces, 3, num_cols]
  split_range(num_pieces, useful_threads(args.num_rows * n, num_threads), [&](int64_t first_piece, int64_t last_piece) {
    TokenKeepBits bits(k, spec, coords, n);
    for (int64_t piece = first_piece; piece < last_piece; ++piece) {
      float* dweight = sums.data() + 3 * n * piece;
      float* dbias = dweight + n;
      float* dx_bias = args.dx_bias == nullptr ? nullptr : dbias + n;
      const int64_t end = args.num_rows * (piece + 1) / num_pieces;
      for (int64_t i = args.num_rows * piece / num_pieces; i < end; ++i) {
        const LayerNormStatistics statistics{args.bias == nullptr ? args.mean[i] : 0.0f, args.rstd[i]};
        float* dx = args.dx == nullptr ? nullptr : args.dx + i * n;
        k.layer_norm_backward(
            {args.dy + i * n, args.kept + i * n, args.weight, args.bias, inverse.empty() ? nullptr : inverse.data(),
             statistics, args.dresidual + i * n, dx, dweight, dbias, dx_bias, bits.draw(i), spec.scale},
            n);
      }
    }
  });
  float* const outputs[3] = {args.dweight, args.dbias, args.dx_bias};
  for (int64_t output = 0; output < 3; ++output) {
    if (outputs[output] == nullptr) continue;
    for (int64_t c = 0; c < n; ++c) outputs[output][c] = 0.0f;
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const float* piece_sums = sums.data() + (3 * piece + output) * n;
      for (int64_t c = 0; c < n; ++c) outputs[output][c] += piece_sums[c];
    }
  }
}

}  // namespace bert_fast::cpu
