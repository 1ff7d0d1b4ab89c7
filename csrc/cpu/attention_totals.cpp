#include "cpu/attention_totals.h"

#include <algorithm>
#include <utility>

#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Tasks to cut the work into where a gradient's blocks are fewer, and floats that their partial sums may take.
constexpr int64_t kTasks = 32, kMaxPartialSums = int64_t{1} << 22;

}  // namespace

PieceTotals::PieceTotals(std::vector<Piece> pieces, int64_t num_blocks, int64_t block_size, float* totals,
                         int num_threads)
    : block_size_(block_size), pieces_(std::move(pieces)) {
  split_range(num_blocks * block_size_, useful_threads(num_blocks * block_size_, num_threads),
              [&](int64_t begin, int64_t end) { std::fill(totals + begin, totals + end, 0.0f); });
  std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.block < b.block; });
  const int64_t most = std::clamp<int64_t>(kTasks / std::max<int64_t>(num_blocks, 1), 1,
                                           1 + kMaxPartialSums / std::max<int64_t>(num_blocks * block_size_, 1));
  for (size_t first = 0, end = 0; first < pieces_.size(); first = end) {
    for (end = first; end < pieces_.size() && pieces_[end].block == pieces_[first].block;) ++end;
    const size_t step = std::min(static_cast<size_t>(most), end - first);
    float* total = totals + pieces_[first].block * block_size_;
    for (size_t i = 0; i < step; ++i) {
      int64_t cost = 0;
      for (size_t piece = first + i; piece < end; piece += step) cost += pieces_[piece].sequence->cost();
      tasks_.push_back({first + i, end, step, i == 0 ? total : nullptr, total, cost});
    }
  }
  size_t num_partial = 0;
  for (const Task& task : tasks_) num_partial += task.sum == nullptr;
  partial_sums_.resize(num_partial * static_cast<size_t>(block_size_));  // zeros
  float* sum = partial_sums_.data();
  for (Task& task : tasks_) {
    if (task.sum != nullptr) continue;
    task.sum = sum;
    sum += block_size_;
  }
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

void PieceTotals::finish(int num_threads) const {
  const int64_t num_partial = static_cast<int64_t>(partial_sums_.size());
  split_range(block_size_, useful_threads(num_partial, num_threads), [&](int64_t begin, int64_t end) {
    for (const Task& task : tasks_) {
      if (task.sum == task.total) continue;
      for (int64_t i = begin; i < end; ++i) task.total[i] += task.sum[i];
    }
  });
}

}  // namespace bert_fast::cpu
