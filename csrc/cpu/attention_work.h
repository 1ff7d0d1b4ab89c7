// The batch of an attention call cut into pieces of one sequence and head, and handed out to threads.

#ifndef BERT_FAST_CPU_ATTENTION_WORK_H_
#define BERT_FAST_CPU_ATTENTION_WORK_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"

namespace bert_fast::cpu {

// One sequence: its tokens in the packed tensors.
struct Sequence {
  int64_t first_q, num_q, first_k, num_k;
  int64_t cost() const { return (num_q + 8) * (num_k + 8); }
};

// Pieces, longest sequences first, one by one.
class Work {
 public:
  // Throws std::invalid_argument where sizes, offsets or coords do not fit.
  Work(const AttentionShape& shape, const DropoutSpec& spec, int num_threads);

  const std::vector<Sequence>& sequences() const { return sequences_; }  // longest first
  int64_t max_keys() const { return max_keys_; }
  int num_threads() const { return num_threads_; }

  // Calls visit(sequence, head, has_next_head) until nothing is left; for several threads at once. has_next_head: the
  // same sequence's next head comes next, on this thread.
  template <class Visit>
  void take(const Visit& visit) {
    const int64_t num_sequences = static_cast<int64_t>(sequences_.size());
    // Whole sequences where there are plenty: a head's neighbour then finds its tokens' pages and lines near.
    const int64_t heads_per_piece = num_sequences >= 4 * num_threads_ ? num_heads_ : 1;
    const int64_t pieces_per_sequence = num_heads_ / heads_per_piece;
    for (int64_t piece = next_++; piece < num_sequences * pieces_per_sequence; piece = next_++) {
      const int64_t first_head = piece % pieces_per_sequence * heads_per_piece;
      for (int64_t head = first_head; head < first_head + heads_per_piece; ++head) {
        visit(sequences_[static_cast<size_t>(piece / pieces_per_sequence)], head,
              head + 1 < first_head + heads_per_piece);
      }
    }
  }

 private:
  std::vector<Sequence> sequences_;
  int64_t num_heads_;
  int64_t max_keys_ = 0;
  int num_threads_ = 1;
  std::atomic<int64_t> next_{0};
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_WORK_H_
