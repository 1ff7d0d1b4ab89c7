// Linear layers of int8 weights on raw buffers: y = activation(x weight^T + bias), with the rows of x rounded to 8 bits
// within.
//
// Sums are exact, and how a row is rounded follows from that row alone. So the bits of a token's result depend neither
// on the other tokens, nor on the number of threads, nor on the instruction set.

#ifndef BERT_FAST_CPU_LINEAR_INT8_H_
#define BERT_FAST_CPU_LINEAR_INT8_H_

#include <cstdint>

#include "cpu/int8.h"
#include "cpu/linear.h"

namespace bert_fast::cpu {

// The longest row whose sums fit into int32: 65,536 * 255 * 128 < 2^31.
constexpr int64_t kMaxInt8Features = 65536;

// As `linear` of linear.h, of parts that all have `int8`. Throws std::invalid_argument, before anything is written,
// where sizes or addresses do not fit.
void linear_int8(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
                 const Activation* activation, int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_LINEAR_INT8_H_
