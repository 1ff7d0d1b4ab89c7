// Linear layers of bf16 products on raw buffers: y = activation(x weight^T + bias), x, y and bias in fp32, with the
// rows of x rounded to bf16 within.
//
// Weights in bf16 are read as they lie; those in fp32 are rounded a few columns at a time, and no copy of them is kept.
// How an element is summed follows from K and the instruction set alone (bf16.h), so the bits of a token's result
// depend neither on the other tokens nor on the number of threads.

#ifndef BERT_FAST_CPU_LINEAR_BF16_H_
#define BERT_FAST_CPU_LINEAR_BF16_H_

#include <cstdint>
#include <cstring>

#include "cpu/bf16.h"
#include "cpu/linear.h"

namespace bert_fast::cpu {

// As `linear` of linear.h, of parts that all have `bf16`, or `is_rounded`. Throws std::invalid_argument, before
// anything is written, where sizes or addresses do not fit.
void linear_bf16(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
                 const Activation* activation, int num_threads);

// values[i] in fp32, exactly.
inline void widen(const Bf16* values, int64_t count, float* made) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t{values[i]} << 16;
    std::memcpy(made + i, &bits, sizeof(bits));
  }
}

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_LINEAR_BF16_H_
