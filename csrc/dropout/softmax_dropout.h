// Softmax with dropout over attention scores, and its gradient, in place on raw fp32 buffers.
//
// Sequences come in a group of n whose scores [n, A, max_q, max_k] were computed by one batched product. Sequence i has
// lens_q[i] queries, tokens starts_q[i] .. of the packed tensors, and lens_k[i] keys. Every element outside becomes
// exactly 0, so the products that follow need no mask. The caller owns every buffer.

#ifndef BERT_FAST_DROPOUT_SOFTMAX_DROPOUT_H_
#define BERT_FAST_DROPOUT_SOFTMAX_DROPOUT_H_

#include <cstdint>

#include "dropout/keep_bits.h"
#include "dropout/kernels.h"

namespace bert_fast::dropout {

struct ScoreGroup {
  int64_t num_groups;  // n
  int64_t num_heads;
  int64_t max_q;
  int64_t max_k;
  const int32_t* starts_q;  // [n]
  const int32_t* lens_q;
  const int32_t* starts_k;
  const int32_t* lens_k;
  int64_t lse_stride;  // lse and delta: element head * lse_stride + token
  float softmax_scale;
  Coords coords_q;  // needed for dropout and for causal
  Coords coords_k;
  bool causal;  // key position > query position is masked
};

// scores: in q.k, out softmax(softmax_scale * q.k) * keep * scale. lse [A, lse_stride]: natural log of the sum of
// exponentials, -inf (and a row of zeros) where there is no key. Throws std::invalid_argument.
void softmax_dropout_forward(float* scores, float* lse, const ScoreGroup& group, const DropoutSpec& spec,
                             int num_threads);

// P = exp(softmax_scale * q.k - lse). scores: in q.k, out P * keep * scale (what dv needs). dp: in dout.v^T, out
// softmax_scale * P * (dp * keep * scale - delta), the gradient of q.k. delta [A, lse_stride] = rowsum(dout * out).
void softmax_dropout_backward(float* scores, float* dp, const float* lse, const float* delta, const ScoreGroup& group,
                              const DropoutSpec& spec, int num_threads);

}  // namespace bert_fast::dropout

#endif  // BERT_FAST_DROPOUT_SOFTMAX_DROPOUT_H_
