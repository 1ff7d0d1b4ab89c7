#include "cpu/attention_totals.h"

#include <algorithm>
#include <utility>

#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Tasks to cut the work into where a gradient's blocks are fewer, and floats that their partial sums may take.
constexpr int64_t kTasks = 32, kMaxPartialSums = int64_t{1} << 22;

}  // namespace

PieceTotals::PieceTotals(std::vector<Piece> pieces, int64_t num_blocks, int64_t block_size, float* totals)
    : block_size_(block_size), pieces_(std::move(pieces)) {
  std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.block < b.block; });
  const int64_t most = std::clamp<int64_t>(kTasks / std::max<int64_t>(num_blocks, 1), 1,
                                           1 + kMaxPartialSums / std::max<int64_t>(num_blocks * block_size_, 1));
  int64_t next_block = 0;
  const auto clear_until = [&](int64_t block) {
    std::fill(totals + next_block * block_size_, totals + block * block_size_, 0.0f);
  };
  for (size_t first = 0, end = 0; first < pieces_.size(); first = end) {
    clear_until(pieces_[first].block);
    next_block = pieces_[first].block + 1;
    for (end = first; end < pieces_.size() && pieces_[end].block == pieces_[first].block;) ++end;
    const size_t step = std::min(static_cast<size_t>(most), end - first);
    float* total = totals + pieces_[first].block * block_size_;
    for (size_t i = 0; i < step; ++i) {
      int64_t cost = 0;
      for (size_t piece = first + i; piece < end; piece += step) cost += pieces_[piece].sequence->cost();
      tasks_.push_back({first + i, end, step, i == 0 ? total : nullptr, total, cost});
    }
  }
  clear_until(num_blocks);
  for (const Task& task : tasks_) num_partial_ += task.sum == nullptr;
  partial_sums_ = Scratch(num_partial_ * block_size_);
  float* sum = partial_sums_.get();
  for (Task& task : tasks_) {
    if (task.sum != nullptr) continue;
    task.sum = sum;
    sum += block_size_;
  }
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

void PieceTotals::finish(int num_threads) const {
  split_range(block_size_, useful_threads(num_partial_ * block_size_, num_threads), [&](int64_t begin, int64_t end) {
    for (const Task& task : tasks_) {
      if (task.sum == task.total) continue;
      for (int64_t i = begin; i < end; ++i) task.total[i] += task.sum[i];
    }
  });
}

}  // namespace bert_fast::cpu
