// Linear layers on raw fp32 buffers: y = activation(x weight^T + bias).
//
// Weights are read as PyTorch keeps them, [N, K] with rows of K floats: there is no copy that a changed weight could
// leave behind. Those of a few columns are laid out for the tiles of many rows in the first cache level, while the ones
// of the next columns are fetched, so that few tokens wait for memory as little as many. The sum of an element runs in
// an order that depends on K alone. So the bits of a token's result depend neither on the other tokens, nor on its
// place among them, nor on the number of threads.

#ifndef BERT_FAST_CPU_LINEAR_H_
#define BERT_FAST_CPU_LINEAR_H_

#include <cstdint>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

// Weights in 8 bits, see int8.h.
struct Int8Weights {
  const int8_t* packed;
  const float* scale;   // [num_columns]
  const int32_t* sums;  // [num_columns]
};

struct Weights {
  const float* weight;  // [num_columns, K], rows `stride` floats apart
  int64_t stride;
  const float* bias;  // [num_columns] or nullptr
  int64_t num_columns;
  Int8Weights int8 = {nullptr, nullptr, nullptr};  // where `packed` is given, they are multiplied, and not `weight`
  const uint16_t* bf16 = nullptr;  // where given, it is multiplied, and not `weight`, which it is in bf16
  bool is_rounded = false;         // `weight` is to be rounded to bf16
};

inline bool is_bf16(const Weights& weights) { return weights.bf16 != nullptr || weights.is_rounded; }

// Rows of floats, `stride` apart.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
};

// The columns of `num_parts` linear layers of one input, one beside the other in y. activation: nullptr for none. Parts
// that are given in 8 bits, all or none, go to `linear_int8` (linear_int8.h), those in bf16 to `linear_bf16`.
// Throws std::invalid_argument, before anything is written, where sizes or addresses do not fit.
void linear(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
            const Activation* activation, int num_threads);

// dst = activation(src), [count] each; dst may be src.
void activate(float* dst, const float* src, int64_t count, Activation activation, int num_threads);

// The activation that a configuration's `hidden_act` names. Throws std::invalid_argument for names it does not know.
Activation activation_of(const char* name);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_LINEAR_H_
