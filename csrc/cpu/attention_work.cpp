#include "cpu/attention_work.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

void require_sizes(const AttentionShape& shape) {
  if (shape.num_heads < 1) {
    throw std::invalid_argument("num_heads: expected at least 1, got " + std::to_string(shape.num_heads));
  }
  if (shape.head_dim < 1 || shape.head_dim > 256) {
    throw std::invalid_argument("head_dim: expected 1 to 256, got " + std::to_string(shape.head_dim));
  }
  if (shape.num_sequences < 0) {
    throw std::invalid_argument("num_sequences: expected at least 0, got " + std::to_string(shape.num_sequences));
  }
  if (shape.lse_stride < shape.num_q_tokens) {
    throw std::invalid_argument("lse_stride: expected at least the number of queries (" +
                                std::to_string(shape.num_q_tokens) + "), got " + std::to_string(shape.lse_stride));
  }
}

// Walks over offsets, which must rise from 0 to num_tokens; throws std::invalid_argument where they do not.
class Offsets {
 public:
  Offsets(const char* name, const int32_t* data, int64_t num_tokens) : name_(name), data_(data), last_(num_tokens) {
    require_address(name, data, 1);
    end_ = *data_;
    if (end_ != 0) refuse();
  }

  // Where the sequences so far end.
  int64_t end() const { return end_; }

  // The length of the next sequence.
  int64_t next() {
    const int64_t begin = end_;
    end_ = *++data_;
    if (end_ < begin || end_ > last_) refuse();
    return end_ - begin;
  }

  void require_end() const {
    if (end_ != last_) refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    throw std::invalid_argument(std::string(name_) + ": expected offsets that rise from 0 to the number of tokens (" +
                                std::to_string(last_) + "), got " + std::to_string(end_));
  }

  const char* name_;
  const int32_t* data_;
  int64_t last_, end_ = 0;
};

}  // namespace

Work::Work(const AttentionShape& shape, const DropoutSpec& spec, int num_threads) : num_heads_(shape.num_heads) {
  require_sizes(shape);
  const bool any_q = shape.num_q_tokens > 0, any_k = shape.num_k_tokens > 0;
  if (any_q && any_k) require_attention_coords(spec, shape.coords_q, shape.coords_k, shape.causal);
  int64_t total_cost = 0;  // in the unit of kMinElementsPerThread: 4 multiply-adds count as one element
  Offsets offsets_q("cu_seqlens_q", shape.cu_seqlens_q, shape.num_q_tokens);
  Offsets offsets_k("cu_seqlens_k", shape.cu_seqlens_k, shape.num_k_tokens);
  sequences_.reserve(static_cast<size_t>(shape.num_sequences));
  for (int64_t i = 0; i < shape.num_sequences; ++i) {
    const int64_t first_q = offsets_q.end(), num_q = offsets_q.next();
    const int64_t first_k = offsets_k.end(), num_k = offsets_k.next();
    if (shape.causal && any_q && any_k) require_ascending(shape.coords_k, first_k, num_k);
    sequences_.push_back({first_q, num_q, first_k, num_k});
    max_keys_ = std::max(max_keys_, num_k);
    total_cost += sequences_.back().cost() * shape.num_heads * shape.head_dim / 4;
  }
  offsets_q.require_end();
  offsets_k.require_end();
  std::stable_sort(sequences_.begin(), sequences_.end(),
                   [](const Sequence& a, const Sequence& b) { return a.cost() > b.cost(); });
  const int64_t num_pieces = shape.num_sequences * num_heads_;
  num_threads_ = static_cast<int>(std::clamp<int64_t>(num_pieces, 1, useful_threads(total_cost, num_threads)));
}

}  // namespace bert_fast::cpu
