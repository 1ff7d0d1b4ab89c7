#include "dropout/softmax_dropout.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "dropout/parallel.h"

namespace bert_fast::dropout {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void check(const ScoreGroup& group, const DropoutSpec& spec) {
  require_shape(group.max_q, group.max_k);
  require_coords(spec, group.coords_q.data);
  require_coords(spec, group.coords_k.data);
  if (group.causal && (group.coords_q.data == nullptr || group.coords_k.data == nullptr)) {
    throw std::invalid_argument("coords_q, coords_k: causal needs the position of every token, got a null address");
  }
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

// How many keys a query sees when keys are consecutive; all of them without causal.
int64_t visible_keys(const ScoreGroup& group, const KeyPositions& keys, int64_t query_token) {
  if (!group.causal || !keys.consecutive) return keys.count;
  const int64_t visible = int64_t{group.coords_q.position(query_token)} - keys.min + 1;
  return std::clamp<int64_t>(visible, 0, keys.count);
}

// The general form of causal: scores of keys after the query become -inf, whose probability is 0.
void mask_later_keys(const ScoreGroup& group, const KeyPositions& keys, int64_t query_token, float* scores) {
  if (!group.causal || keys.consecutive) return;
  const int32_t position = group.coords_q.position(query_token);
  for (int64_t c = 0; c < keys.count; ++c) {
    if (group.coords_k.position(keys.first_token + c) > position) scores[c] = kMinusInfinity;
  }
}

// Calls visit(row, query_token, head, softmax_row) for the rows of real queries and blank(row) for the others, row
// being the index in the flattened [n, A, max_q].
template <class Visit, class Blank>
void for_rows(const ScoreGroup& group, const DropoutSpec& spec, int num_threads, const Visit& visit,
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
    ProbabilityKeepBits bits(k, spec, group.coords_q, group.coords_k, group.max_k);
    const int64_t end = shares.begin(share + 1);
    for (int64_t row = shares.begin(share); row < end; ++row) {
      const int64_t query = row % group.max_q, head = row / group.max_q % group.num_heads;
      const int64_t i = row / group.max_q / group.num_heads;
      if (query >= group.lens_q[i]) {
        blank(row);
        continue;
      }
      const int64_t token = group.starts_q[i] + query;
      const int64_t visible = visible_keys(group, keys[static_cast<size_t>(i)], token);
      const uint8_t* row_bits = visible == 0 ? nullptr : bits.draw(token, head, keys[static_cast<size_t>(i)]);
      visit(k, row, token, head, keys[static_cast<size_t>(i)],
            SoftmaxRow{visible, group.max_k, group.softmax_scale, row_bits, spec.scale});
    }
  });
}

}  // namespace

void softmax_dropout_forward(float* scores, float* lse, const ScoreGroup& group, const DropoutSpec& spec,
                             int num_threads) {
  const int64_t width = group.max_k;
  for_rows(
      group, spec, num_threads,
      [&](const Kernels& k, int64_t row, int64_t token, int64_t head, const KeyPositions& keys,
          const SoftmaxRow& softmax_row) {
        mask_later_keys(group, keys, token, scores + row * width);
        lse[head * group.lse_stride + token] = k.softmax_forward(scores + row * width, softmax_row);
      },
      [&](int64_t row) { std::fill_n(scores + row * width, width, 0.0f); });
}

void softmax_dropout_backward(float* scores, float* dp, const float* lse, const float* delta, const ScoreGroup& group,
                              const DropoutSpec& spec, int num_threads) {
  const int64_t width = group.max_k;
  for_rows(
      group, spec, num_threads,
      [&](const Kernels& k, int64_t row, int64_t token, int64_t head, const KeyPositions& keys,
          const SoftmaxRow& softmax_row) {
        mask_later_keys(group, keys, token, scores + row * width);
        const int64_t statistic = head * group.lse_stride + token;
        k.softmax_backward(scores + row * width, dp + row * width, lse[statistic], delta[statistic], softmax_row);
      },
      [&](int64_t row) {
        std::fill_n(scores + row * width, width, 0.0f);
        std::fill_n(dp + row * width, width, 0.0f);
      });
}

}  // namespace bert_fast::dropout
