#include "dropout/softmax_dropout.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "dropout/parallel.h"

namespace bert_fast::dropout {
namespace {

void check(const ScoreGroup& group, const DropoutSpec& spec) {
  require_shape(group.max_q, group.max_k);
  if (group.max_q > 0 && group.max_k > 0) require_attention_coords(spec, group.coords_q, group.coords_k, group.causal);
  for (int64_t i = 0; i < group.num_groups; ++i) {
    if (group.lens_q[i] < 0 || group.lens_q[i] > group.max_q || group.lens_k[i] < 0 || group.lens_k[i] > group.max_k) {
      throw std::invalid_argument("lens_q, lens_k: expected 0 .. max_q = " + std::to_string(group.max_q) +
                                  " and 0 .. max_k = " + std::to_string(group.max_k) + "; sequence " +
                                  std::to_string(i) + " has " + std::to_string(group.lens_q[i]) + " and " +
                                  std::to_string(group.lens_k[i]));
    }
  }
}

// Rows of the flattened [n, A, max_q] cut into shares of equal work: a row costs its keys and, whatever it holds, a
// pass over its width. Shares only decide who works, so an estimate is enough.
class RowShares {
 public:
  RowShares(const ScoreGroup& group, int num_threads) : group_(group) {
    for (int64_t i = 0; i < group.num_groups; ++i) total_ += group_cost(i);
    num_shares_ = useful_threads(group.num_groups * group.num_heads * group.max_q * group.max_k, num_threads);
  }
  int num_shares() const { return num_shares_; }

  // First row of a share; that of share num_shares() is the number of rows.
  int64_t begin(int share) const {
    const int64_t rows_per_group = group_.num_heads * group_.max_q;
    if (share == num_shares_) return group_.num_groups * rows_per_group;
    double target = total_ * share / num_shares_;
    for (int64_t i = 0; i < group_.num_groups; ++i) {
      if (target < group_cost(i)) {
        return i * rows_per_group + static_cast<int64_t>(static_cast<double>(rows_per_group) * target / group_cost(i));
      }
      target -= group_cost(i);
    }
    return group_.num_groups * rows_per_group;
  }

 private:
  double group_cost(int64_t i) const {
    const double width = static_cast<double>(group_.max_k + 16), rows = static_cast<double>(group_.max_q);
    return static_cast<double>(group_.num_heads) *
           (rows * width + 8.0 * static_cast<double>(group_.lens_q[i]) * static_cast<double>(group_.lens_k[i]));
  }

  const ScoreGroup& group_;
  double total_ = 0.0;
  int num_shares_ = 1;
};

// Calls visit(kernels, row, statistic, softmax_row) for the rows of real queries and blank(row) for the others, row
// being the index in the flattened [n, A, max_q] and statistic that in lse. scores may be masked on the way.
template <class Visit, class Blank>
void for_rows(float* scores, const ScoreGroup& group, const DropoutSpec& spec, int num_threads, const Visit& visit,
              const Blank& blank) {
  check(group, spec);
  const Kernels& k = kernels();
  std::vector<KeyPositions> keys;
  const bool positions_matter = spec.active() || group.causal;
  for (int64_t i = 0; i < group.num_groups; ++i) {
    const Coords coords = positions_matter ? group.coords_k : Coords{nullptr};
    keys.push_back(key_positions(coords, group.starts_k[i], group.lens_k[i]));
  }
  const RowShares shares(group, num_threads);
  run_threads(shares.num_shares(), [&](int share) {
    QueryRows rows(k, spec, group.coords_q, group.coords_k, group.causal, group.softmax_scale, group.max_k);
    const int64_t end = shares.begin(share + 1);
    for (int64_t row = shares.begin(share); row < end; ++row) {
      const int64_t query = row % group.max_q, head = row / group.max_q % group.num_heads;
      const int64_t i = row / group.max_q / group.num_heads;
      if (query >= group.lens_q[i]) {
        blank(row);
        continue;
      }
      const int64_t token = group.starts_q[i] + query;
      visit(k, row, head * group.lse_stride + token,
            rows.prepare(keys[static_cast<size_t>(i)], token, head, scores + row * group.max_k, group.max_k));
    }
  });
}

}  // namespace

void softmax_dropout_forward(float* scores, float* lse, const ScoreGroup& group, const DropoutSpec& spec,
                             int num_threads) {
  const int64_t width = group.max_k;
  for_rows(
      scores, group, spec, num_threads,
      [&](const Kernels& k, int64_t row, int64_t statistic, const SoftmaxRow& softmax_row) {
        lse[statistic] = k.softmax_forward(scores + row * width, softmax_row);
      },
      [&](int64_t row) { std::fill_n(scores + row * width, width, 0.0f); });
}

void softmax_dropout_backward(float* scores, float* dp, const float* lse, const float* delta, const ScoreGroup& group,
                              const DropoutSpec& spec, int num_threads) {
  const int64_t width = group.max_k;
  for_rows(
      scores, group, spec, num_threads,
      [&](const Kernels& k, int64_t row, int64_t statistic, const SoftmaxRow& softmax_row) {
        k.softmax_backward(scores + row * width, dp + row * width, lse[statistic], delta[statistic], softmax_row);
      },
      [&](int64_t row) {
        std::fill_n(scores + row * width, width, 0.0f);
        std::fill_n(dp + row * width, width, 0.0f);
      });
}

}  // namespace bert_fast::dropout
