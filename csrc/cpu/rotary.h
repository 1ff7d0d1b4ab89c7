// Rotary position embedding of fp32 heads, on raw buffers: bert_fast/reference/rotary.py.
//
// The caller owns every buffer. num_threads <= 0: as many as there are. Cost: every element is read and written once.
// Errors: std::invalid_argument.

#ifndef BERT_FAST_CPU_ROTARY_H_
#define BERT_FAST_CPU_ROTARY_H_

#include <cstdint>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

// Where the heads [T, P, A, 2F] of a tensor begin; strides count floats, numbers of a head are neighbours.
struct HeadStrides {
  int64_t token, part, head;
};

struct RotaryArguments {
  const float* x;
  float* y;          // may be x, with the strides of x
  const float* cos;  // [T, F]
  const float* sin;
  int64_t num_tokens, num_parts, num_heads, num_freqs;
  int64_t turned_parts;  // the first so many parts are turned, the others copied
  HeadStrides x_strides, y_strides;
  bool is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + F)
  bool is_backward;     // turns by the negative angle
};

void rotary(const RotaryArguments& args, int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ROTARY_H_
