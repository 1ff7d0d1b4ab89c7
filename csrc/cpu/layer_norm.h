// h = residual + dropout(x + x_bias); y = layer_norm(h), and its gradients, on raw fp32 buffers, all [num_rows,
// num_cols] contiguous. The caller owns every buffer; nullptr marks what is not there or not wanted.
//
// Bytes per element: forward reads x and residual and writes h and y (16; 12 without h), backward reads dy and h (or y)
// and writes dresidual and dx (16; 12 without dx). A row stays in the first-level cache between its passes.

#ifndef BERT_FAST_CPU_LAYER_NORM_H_
#define BERT_FAST_CPU_LAYER_NORM_H_

#include <cstdint>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

struct LayerNormForward {
  const float* x;
  const float* x_bias;  // [num_cols] or nullptr
  const float* residual;
  const float* weight;  // [num_cols]
  const float* bias;    // [num_cols]
  float* y;             // may be x or residual
  float* h;             // nullptr: not stored; may be x or residual
  float* mean;          // [num_rows] or nullptr
  float* rstd;          // [num_rows] or nullptr
  int64_t num_rows;
  int64_t num_cols;
  float eps;
};

// The variance is the mean square of h - mean, not E[h^2] - E[h]^2.
void dropout_add_layer_norm_forward(const LayerNormForward& args, const int32_t* coords, const DropoutSpec& spec,
                                    int num_threads);

// Whether every column has min_weight <= |weight| <= max_weight and |bias| <= max_shift * |weight|: backward may then
// read the normalised row from y. False where a parameter is NaN.
bool output_suffices(const float* weight, const float* bias, int64_t num_cols, float min_weight, float max_weight,
                     float max_shift);

struct LayerNormBackward {
  const float* dy;
  const float* kept;  // h; or, where bias is given, y
  const float* mean;  // not read where bias is given
  const float* rstd;
  const float* weight;
  const float* bias;  // nullptr: kept is h
  float* dresidual;
  float* dx;       // = dropout(dresidual); nullptr: not stored
  float* dx_bias;  // [num_cols], column sums of dx, or nullptr
  float* dweight;  // [num_cols]
  float* dbias;    // [num_cols]
  int64_t num_rows;
  int64_t num_cols;
};

// Column sums: rows are cut into a number of pieces that depends on num_rows alone, each summed in order, and the
// pieces added in order, so the bits do not depend on the number of threads.
void dropout_add_layer_norm_backward(const LayerNormBackward& args, const int32_t* coords, const DropoutSpec& spec,
                                     int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_LAYER_NORM_H_
