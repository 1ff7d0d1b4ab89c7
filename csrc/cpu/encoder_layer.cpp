#include "cpu/encoder_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/attention_bf16.h"
#include "cpu/layer_norm.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Tokens that go through the MLP at a time: what lies between its products, 6 MB at I = 3,072, then stays in the caches
// of the threads that share it.
constexpr int64_t kMlpRows = 512;

// y = layer_norm(product + bias + residual); y may be product.
void close_branch(const float* product, const float* bias, const float* residual, const NormWeights& norm, float* y,
                  int64_t num_rows, int64_t hidden_size, int num_threads) {
  dropout_add_layer_norm_forward(
      {product, bias, residual, norm.weight, norm.bias, y, nullptr, nullptr, nullptr, num_rows, hidden_size, norm.eps},
      nullptr, DropoutSpec{}, num_threads);
}

// Without its bias, which is added with the residual.
Weights without_bias(Weights weights) {
  weights.bias = nullptr;
  return weights;
}

void require_fit(const EncoderLayer& layer, const PackedBatch& batch) {
  const int64_t n = layer.query.num_columns, h = batch.hidden_size;
  if (layer.num_heads < 1 || n < 1 || n % layer.num_heads != 0) {
    throw std::invalid_argument("num_heads: expected a divisor of the number of columns of query (" +
                                std::to_string(n) + "), got " + std::to_string(layer.num_heads));
  }
  if (layer.key.num_columns != n || layer.value.num_columns != n || layer.attention_output.num_columns != h ||
      layer.down.num_columns != h) {
    throw std::invalid_argument("weights: expected layers of one width, and two that lead back to hidden_size");
  }
  if (batch.rows == nullptr && batch.num_queries != batch.num_tokens) {
    throw std::invalid_argument("num_queries: expected " + std::to_string(batch.num_tokens) + " without rows, got " +
                                std::to_string(batch.num_queries));
  }
}

// y may not be x.
void encoder_layer(const float* x, float* y, const EncoderLayer& layer, const PackedBatch& batch, int num_threads) {
  const int64_t h = batch.hidden_size, n = layer.query.num_columns, tokens = batch.num_tokens;
  const int64_t queries = batch.num_queries, wide = layer.up.num_columns;
  const int64_t mlp_rows = std::min(queries, kMlpRows);
  require_address("x", x, tokens * h);
  require_address("y", y, queries * h);

  // What attention reads makes room for what the MLP has between its products.
  const Scratch heads(std::max(tokens * 3 * n, mlp_rows * wide)), attended(queries * n), lse(queries * layer.num_heads);
  const Scratch residual_rows(batch.rows == nullptr ? 0 : queries * h), z(queries * h);
  const float* residual = x;
  float *q = heads.get(), *k = q + n, *v = k + n;
  int64_t q_stride = 3 * n;
  const int64_t kv_stride = batch.rows == nullptr ? 3 * n : 2 * n;
  if (batch.rows == nullptr) {
    const Weights parts[] = {layer.query, layer.key, layer.value};
    linear({x, h}, parts, 3, {q, q_stride}, tokens, h, nullptr, num_threads);
  } else {
    for (int64_t i = 0; i < queries; ++i) {
      if (batch.rows[i] < 0 || batch.rows[i] >= tokens) {
        throw std::invalid_argument("rows: expected 0 to " + std::to_string(tokens - 1) + ", got " +
                                    std::to_string(batch.rows[i]));
      }
      std::memcpy(residual_rows.get() + i * h, x + batch.rows[i] * h, static_cast<size_t>(h) * sizeof(float));
    }
    residual = residual_rows.get();
    q_stride = n;
    k = q + queries * n;
    v = k + n;
    const Weights parts[] = {layer.key, layer.value};
    linear({residual, h}, &layer.query, 1, {q, n}, queries, h, nullptr, num_threads);
    linear({x, h}, parts, 2, {k, kv_stride}, tokens, h, nullptr, num_threads);
  }
  const float softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n / layer.num_heads)));
  const AttentionShape shape{
      batch.cu_seqlens_q,     batch.cu_seqlens_k,  batch.num_sequences, queries, tokens,
      layer.num_heads,        n / layer.num_heads, softmax_scale,       queries, Coords{batch.coords_q},
      Coords{batch.coords_k}, layer.causal};
  if (is_bf16(layer.query) && !layer.causal && runs_attention_bf16()) {
    attention_forward_bf16({q, q_stride}, {k, kv_stride}, {v, kv_stride}, {attended.get(), n}, shape, num_threads);
  } else {
    attention_forward({q, q_stride}, {k, kv_stride}, {v, kv_stride}, {attended.get(), n}, lse.get(), shape,
                      DropoutSpec{}, num_threads);
  }

  const Weights attention_output = without_bias(layer.attention_output), down = without_bias(layer.down);
  linear({attended.get(), n}, &attention_output, 1, {z.get(), h}, queries, n, nullptr, num_threads);
  close_branch(z.get(), layer.attention_output.bias, residual, layer.attention_norm, z.get(), queries, h, num_threads);
  float* const between = heads.get();
  for (int64_t first = 0; first < queries; first += kMlpRows) {
    const int64_t rows = std::min(kMlpRows, queries - first);
    float* const of_rows = y + first * h;
    linear({z.get() + first * h, h}, &layer.up, 1, {between, wide}, rows, h, &layer.activation, num_threads);
    linear({between, wide}, &down, 1, {of_rows, h}, rows, wide, nullptr, num_threads);
    close_branch(of_rows, layer.down.bias, z.get() + first * h, layer.norm, of_rows, rows, h, num_threads);
  }
}

}  // namespace

void encoder_layers(const float* x, float* y, const EncoderLayer* layers, size_t num_layers, const PackedBatch& batch,
                    int num_threads) {
  for (size_t i = 0; i < num_layers; ++i) require_fit(layers[i], batch);
  PackedBatch of_all = batch;
  if (batch.rows != nullptr) {
    of_all.rows = nullptr;
    of_all.num_queries = batch.num_tokens;
    of_all.cu_seqlens_q = batch.cu_seqlens_k;
    of_all.coords_q = batch.coords_k;
  }
  const Scratch states(num_layers < 2 ? 0 : batch.num_tokens * batch.hidden_size);
  const Scratch others(num_layers < 3 ? 0 : batch.num_tokens * batch.hidden_size);
  float* made[] = {states.get(), others.get()};
  for (size_t i = 0; i < num_layers; ++i) {
    const bool is_last = i + 1 == num_layers;
    float* const out = is_last ? y : made[i % 2];
    encoder_layer(x, out, layers[i], is_last ? batch : of_all, num_threads);
    x = out;
  }
}

}  // namespace bert_fast::cpu
