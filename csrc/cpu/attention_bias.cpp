#include "cpu/attention_bias.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace bert_fast::cpu {
namespace {

// One coordinate of every token, each less than `size`; where that is 1, the array is broadcast, and all are 0.
std::vector<int32_t> coordinates(const char* name, Coords coords, int part, int64_t num_tokens, int64_t size) {
  std::vector<int32_t> values(static_cast<size_t>(num_tokens), 0);
  if (size == 1) return values;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int32_t value = coords.data[2 * token + part];
    if (value < 0 || value >= size) {
      throw std::invalid_argument(std::string(name) + ": expected rows and positions within the bias (0 to " +
                                  std::to_string(size - 1) + "), got " + std::to_string(value));
    }
    values[static_cast<size_t>(token)] = value;
  }
  return values;
}

void require_bias(const AttentionShape& shape) {
  const ScoreBias& bias = shape.bias;
  for (const int64_t size : bias.sizes) {
    if (size < 1) throw std::invalid_argument("bias: expected sizes of at least 1, got " + std::to_string(size));
  }
  if (bias.sizes[1] != 1 && bias.sizes[1] != shape.num_heads) {
    throw std::invalid_argument("bias: expected 1 or " + std::to_string(shape.num_heads) + " heads, got " +
                                std::to_string(bias.sizes[1]));
  }
  if (shape.coords_q.data == nullptr || shape.coords_k.data == nullptr) {
    throw std::invalid_argument("coords_q, coords_k: bias needs the row and position of every token, got address 0");
  }
}

}  // namespace

BiasPlaces::BiasPlaces(const AttentionShape& shape) {
  const ScoreBias& bias = shape.bias;
  // Without queries or without keys there is no score.
  if (bias.data == nullptr || shape.num_q_tokens == 0 || shape.num_k_tokens == 0) return;
  require_bias(shape);
  rows_ = coordinates("coords_q", shape.coords_q, 0, shape.num_q_tokens, bias.sizes[0]);
  queries_ = coordinates("coords_q", shape.coords_q, 1, shape.num_q_tokens, bias.sizes[2]);
  keys_ = coordinates("coords_k", shape.coords_k, 1, shape.num_k_tokens, bias.sizes[3]);
}

int64_t BiasPlaces::row(const Sequence& sequence) const {
  return rows_.empty() || sequence.num_q == 0 ? 0 : rows_[static_cast<size_t>(sequence.first_q)];
}

BiasRows::BiasRows(const ScoreBias& bias, const BiasPlaces& places, int64_t max_keys)
    : bias_(bias), places_(places), row_(static_cast<size_t>(bias.data == nullptr ? 0 : max_keys)) {}

void BiasRows::start(const Sequence& sequence, int64_t head, float* gradient) {
  keys_ = places_.keys(sequence);
  gradient_ = gradient;
  if (keys_ == nullptr) return;
  block_ = bias_.data + places_.row(sequence) * bias_.strides[0] + (bias_.sizes[1] == 1 ? 0 : head * bias_.strides[1]);
  are_neighbours_ = bias_.sizes[3] > 1;
  for (int64_t key = 1; key < sequence.num_k && are_neighbours_; ++key) {
    are_neighbours_ = keys_[key] == keys_[key - 1] + 1;
  }
  if (gradient != nullptr && !are_neighbours_) gradient_row_.resize(row_.size());
}

const float* BiasRows::row(int64_t query_token, int64_t num_keys) {
  if (keys_ == nullptr) return nullptr;
  const float* elements = block_ + places_.query(query_token) * bias_.strides[2];
  const int64_t stride = bias_.strides[3];
  if (num_keys == 0) return elements;
  if (are_neighbours_ && stride == 1) return elements + keys_[0];
  for (int64_t key = 0; key < num_keys; ++key) row_[static_cast<size_t>(key)] = elements[keys_[key] * stride];
  return row_.data();
}

float* BiasRows::gradient_of(int64_t query_token) const {
  return gradient_ + places_.query(query_token) * bias_.sizes[3];
}

float* BiasRows::gradient_row(int64_t query_token, int64_t num_keys) {
  if (gradient_ == nullptr || num_keys == 0) return gradient_;
  if (are_neighbours_) return gradient_of(query_token) + keys_[0];
  std::fill_n(gradient_row_.begin(), num_keys, 0.0f);
  return gradient_row_.data();
}

void BiasRows::finish_gradient_row(int64_t query_token, int64_t num_keys) {
  if (gradient_ == nullptr || are_neighbours_) return;
  float* elements = gradient_of(query_token);
  if (bias_.sizes[3] == 1) {
    float sum = 0.0f;
    for (int64_t key = 0; key < num_keys; ++key) sum += gradient_row_[static_cast<size_t>(key)];
    *elements += sum;
    return;
  }
  for (int64_t key = 0; key < num_keys; ++key) elements[keys_[key]] += gradient_row_[static_cast<size_t>(key)];
}

std::vector<PieceTotals::Piece> bias_pieces(const ScoreBias& bias, const BiasPlaces& places,
                                            const std::vector<Sequence>& sequences, int64_t num_heads) {
  std::vector<PieceTotals::Piece> pieces;
  pieces.reserve(sequences.size() * static_cast<size_t>(num_heads));
  for (const Sequence& sequence : sequences) {
    const int64_t first_block = places.row(sequence) * bias.sizes[1];
    for (int64_t head = 0; head < num_heads; ++head) {
      pieces.push_back({first_block + (bias.sizes[1] == 1 ? 0 : head), &sequence, head});
    }
  }
  return pieces;
}

}  // namespace bert_fast::cpu
