// Attention over packed sequences on raw fp32 buffers, one (sequence, head) at a time, with dropout:
// out = dropout(softmax(softmax_scale * (q k^T + R) + bias)) v, and its gradients, where R are scores of relative
// positions.
//
// Scores never leave the second-level cache: blocks of query rows go through product, softmax and product in turn.
// Nothing of size [Sq, Sk] is stored; backward makes the probabilities again from q, k and lse. Every (sequence, head)
// writes memory of its own, so the bits do not depend on the number of threads; the sums of the gradients of a bias and
// of tables, see attention_totals.h, do not either. The caller owns every buffer.

#ifndef BERT_FAST_CPU_ATTENTION_H_
#define BERT_FAST_CPU_ATTENTION_H_

#include <cstdint>

#include "cpu/keep_bits.h"
#include "cpu/kernels.h"

namespace bert_fast::cpu {

// Packed tensors [T, A, D]: a token's heads are contiguous (head h at h * D), tokens `stride` floats apart.
template <class T>
struct Packed {
  T* data;
  int64_t stride;
  // nullptr stays nullptr: PyTorch gives tensors without elements no address.
  T* at(int64_t token, int64_t head, int64_t head_dim) const {
    return data == nullptr ? nullptr : data + token * stride + head * head_dim;
  }
};

// [rows of the original batch or 1, num_heads or 1, positions of queries or 1, of keys or 1]: a dimension of 1 is the
// same for all; -inf removes a key from a query.
struct ScoreBias {
  const float* data = nullptr;  // nullptr: none
  int64_t sizes[4] = {1, 1, 1, 1};
  int64_t strides[4] = {0, 0, 0, 0};  // in floats, any; 0 broadcasts
};

// [2M - 1, num_heads, head_dim]: row M - 1 + d belongs to the distance d = position of a query - position of a key.
struct RelativeTable {
  const float* data = nullptr;              // nullptr: none
  int64_t row_stride = 0, head_stride = 0;  // in floats, any; 0 broadcasts
};

struct AttentionShape {
  const int32_t* cu_seqlens_q;  // [num_sequences + 1], rising from 0 to num_q_tokens
  const int32_t* cu_seqlens_k;  // [num_sequences + 1], rising from 0 to num_k_tokens
  int64_t num_sequences;
  int64_t num_q_tokens;  // Tq
  int64_t num_k_tokens;  // Tk
  int64_t num_heads;
  int64_t head_dim;  // at most 256; multiples of 16 save a copy of every result
  float softmax_scale;
  int64_t lse_stride;  // lse [A, lse_stride]: element head * lse_stride + token
  Coords coords_q;     // needed for dropout, causal, a bias and tables
  Coords coords_k;     // needed for causal, then ascending within a sequence, a bias and tables
  bool causal;         // key position > query position is masked
  ScoreBias bias{};
  // A query's product with the first, and a key's with the second, is added to their q k^T.
  RelativeTable relative_keys{}, relative_queries{};
  int64_t num_distances = 0;  // 2M - 1, of both
};

// lse: natural log of the sum of exponentials of the scores; where there is no key, -inf, and out is 0.
// Throws std::invalid_argument, before anything is written, where sizes, offsets or addresses do not fit; offsets are
// read once, so that they may lie where somebody else writes. std::bad_alloc, with the outputs partly written, where
// there is no room for a few buffers of head_dim x keys floats per thread, for copies of the tables, or for partial
// sums of the gradients of a bias and of tables (16 MiB at most).
void attention_forward(Packed<const float> q, Packed<const float> k, Packed<const float> v, Packed<float> out,
                       float* lse, const AttentionShape& shape, const DropoutSpec& spec, int num_threads);

struct AttentionGradients {
  Packed<float> dq, dk, dv;
  float* dbias = nullptr;  // contiguous, of the bias's sizes; nullptr: not wanted
  // Contiguous [num_distances, num_heads, head_dim]; nullptr: not wanted.
  float* drelative_keys = nullptr;
  float* drelative_queries = nullptr;
};

// `out` is not needed: delta = rowsum(dout * out) is taken from rowsum(P * dP), which is at hand.
void attention_backward(Packed<const float> dout, Packed<const float> q, Packed<const float> k, Packed<const float> v,
                        const float* lse, const AttentionGradients& gradients, const AttentionShape& shape,
                        const DropoutSpec& spec, int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_H_
