// A bias on the scores of attention, looked up by the names of queries and keys, and its gradient.
//
// Nothing broadcast is written out: a row of the bias is read where it lies, or, where its keys are no neighbours
// (positions with holes, strides, one value for all keys), gathered when its query's turn comes. The gradient is summed
// up over all that looked at an element, in an order that the shapes fix: the bits do not depend on the number of
// threads.

#ifndef BERT_FAST_CPU_ATTENTION_BIAS_H_
#define BERT_FAST_CPU_ATTENTION_BIAS_H_

#include <cstdint>
#include <vector>

#include "cpu/attention_totals.h"
#include "cpu/attention_work.h"

namespace bert_fast::cpu {

// The row and positions of a call's tokens, copied once, so that another thread may write to the caller's array.
class BiasPlaces {
 public:
  // Throws std::invalid_argument where the bias has no element for a token, or an address is missing; without a bias
  // nothing is read.
  explicit BiasPlaces(const AttentionShape& shape);

  // In the original batch: that of its first query; 0 where there is none, which looks nothing up.
  int64_t row(const Sequence& sequence) const;
  int64_t query(int64_t token) const { return queries_[static_cast<size_t>(token)]; }
  // Positions of a sequence's keys; nullptr without a bias.
  const int32_t* keys(const Sequence& sequence) const {
    return keys_.empty() ? nullptr : keys_.data() + sequence.first_k;
  }

 private:
  std::vector<int32_t> rows_, queries_, keys_;
};

// One thread's rows of the bias and of its gradient, of one sequence and head after the other.
class BiasRows {
 public:
  // bias and places must live as long.
  BiasRows(const ScoreBias& bias, const BiasPlaces& places, int64_t max_keys);

  // gradient: the block [queries or 1, keys or 1] of this row and head, contiguous; nullptr: none is wanted.
  void start(const Sequence& sequence, int64_t head, float* gradient = nullptr);

  // What is added to the scores of a query and the first num_keys keys, valid until the next call; nullptr without a
  // bias.
  const float* row(int64_t query_token, int64_t num_keys);

  // Where the gradients of the same are to be added to, nullptr where none is wanted, and what must follow then.
  float* gradient_row(int64_t query_token, int64_t num_keys);
  void finish_gradient_row(int64_t query_token, int64_t num_keys);

 private:
  float* gradient_of(int64_t query_token) const;

  const ScoreBias& bias_;
  const BiasPlaces& places_;
  std::vector<float> row_, gradient_row_;  // of one query, where keys are no neighbours
  const float* block_ = nullptr;
  float* gradient_ = nullptr;
  const int32_t* keys_ = nullptr;
  bool are_neighbours_ = true;
};

// Every sequence and head, each with the block [queries or 1, keys or 1] of the bias's gradient that it adds to.
std::vector<PieceTotals::Piece> bias_pieces(const ScoreBias& bias, const BiasPlaces& places,
                                            const std::vector<Sequence>& sequences, int64_t num_heads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_BIAS_H_
