// Gradients that many pieces of an attention call add to, one block of floats per piece.
//
// Pieces that add to one block are dealt out to a number of partial sums that the shapes fix; a task is what one of
// them is given, in order. So the bits do not depend on the number of threads.

#ifndef BERT_FAST_CPU_ATTENTION_TOTALS_H_
#define BERT_FAST_CPU_ATTENTION_TOTALS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/attention_work.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {

class PieceTotals {
 public:
  struct Piece {
    int64_t block;  // that it adds to
    const Sequence* sequence;
    int64_t head;
  };

  // totals [num_blocks, block_size]: 0 where no piece adds, here, the others by `take`. Sequences must live as long.
  PieceTotals(std::vector<Piece> pieces, int64_t num_blocks, int64_t block_size, float* totals);

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  // Calls visit(sequence, head, block) until nothing is left; for several threads at once.
  template <class Visit>
  void take(const Visit& visit) {
    for (int64_t number = next_++; number < num_tasks(); number = next_++) {
      const Task& task = tasks_[static_cast<size_t>(number)];
      std::fill_n(task.sum, block_size_, 0.0f);
      for (size_t piece = task.first; piece < task.end; piece += task.step) {
        visit(*pieces_[piece].sequence, pieces_[piece].head, task.sum);
      }
    }
  }

  // Adds the partial sums up, when every piece was visited.
  void finish(int num_threads) const;

 private:
  struct Task {
    size_t first, end, step;
    float* sum;
    float* total;  // the block; that of the first task of every block is its sum
    int64_t cost;
  };

  int64_t block_size_;
  std::vector<Piece> pieces_;
  int64_t num_partial_ = 0;
  Scratch partial_sums_{0};
  std::vector<Task> tasks_;  // those of one block one after the other, until they are sorted for `take`
  std::atomic<int64_t> next_{0};
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_TOTALS_H_
