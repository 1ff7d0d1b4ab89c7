// Layers of BERT without gradients, in one call: the routines of linear.h, attention.h and layer_norm.h one after the
// other, as bert_fast/reference/encoder_layer.py puts them together. Its bits are theirs.

#ifndef BERT_FAST_CPU_ENCODER_LAYER_H_
#define BERT_FAST_CPU_ENCODER_LAYER_H_

#include <cstddef>
#include <cstdint>

#include "cpu/linear.h"

namespace bert_fast::cpu {

struct NormWeights {
  const float* weight;  // [H]
  const float* bias;    // [H]
  float eps;
};

struct EncoderLayer {
  Weights query, key, value;  // [N, H], N = A * D
  Weights attention_output;   // [H, N]
  NormWeights attention_norm;
  Weights up;    // [I, H]
  Weights down;  // [H, I]
  NormWeights norm;
  int64_t num_heads;
  bool causal;
  Activation activation;
};

// The packed batch. rows: the tokens that are wanted of the last layer, [num_queries], of which cu_seqlens_q and
// coords_q are; nullptr: all, and num_queries = num_tokens.
struct PackedBatch {
  const int64_t* rows;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* coords_q;
  const int32_t* coords_k;
  int64_t num_sequences;
  int64_t num_queries;
  int64_t num_tokens;
  int64_t hidden_size;
};

// y [num_queries, H] from x [num_tokens, H], rows contiguous, by layers of which each takes what the one before made; y
// may not be x. Throws as the routines do that it calls.
void encoder_layers(const float* x, float* y, const EncoderLayer* layers, size_t num_layers, const PackedBatch& batch,
                    int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ENCODER_LAYER_H_
