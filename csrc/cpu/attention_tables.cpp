#include "cpu/attention_tables.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Rows of a product: the more, the more of its window lies outside the scores. Of queries 24, four tiles high, and of
// keys 16, the vectors that a transpose takes at once.
constexpr int64_t kQueryRows = 24, kKeyRows = 16;
static_assert(kQueryRows <= ScoreBlock::kBefore && kKeyRows <= ScoreBlock::kBefore);
// A product's row starts up to kQueryRows - 1 floats before the scores' and ends up to one vector beyond their window.
static_assert(2 * (kQueryRows - 1) + kMatmulColumns <= ScoreBlock::kBetween);

// Beyond the last offset: windows are read in whole vectors.
constexpr int64_t kColumnsBeyond = 2 * kMatmulColumns;

Range range_of(const int32_t* positions, int64_t count) {
  int32_t lowest = positions[0], highest = positions[0];
  for (int64_t i = 1; i < count; ++i) {
    lowest = std::min(lowest, positions[i]);
    highest = std::max(highest, positions[i]);
  }
  return {lowest, highest};
}

bool follow_one_another(const int32_t* positions, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    if (positions[i] != int64_t{positions[i - 1]} + 1) return false;
  }
  return true;
}

std::vector<int32_t> positions_of(Coords coords, int64_t num_tokens) {
  std::vector<int32_t> positions(static_cast<size_t>(num_tokens));
  for (int64_t token = 0; token < num_tokens; ++token) positions[static_cast<size_t>(token)] = coords.position(token);
  return positions;
}

}  // namespace

OffsetVectors::OffsetVectors(int64_t max_offsets, int64_t head_dim, bool has_rows)
    : d_(head_dim),
      width_(padded(head_dim)),
      stride_(row_stride(padded(max_offsets + kColumnsBeyond))),
      has_rows_(has_rows || width_ != d_),
      columns_(width_ * stride_),
      rows_(has_rows_ ? max_offsets * width_ : 0) {}

void OffsetVectors::lay_out(const Kernels& kernel, const float* first, int64_t step, int64_t num_offsets) {
  if (first == first_ && num_offsets == num_offsets_) return;
  first_ = first;
  num_offsets_ = num_offsets;
  if (has_rows_) gather_rows(rows_.get(), first, step, num_offsets, d_);
  kernel.transpose(columns_.get(), stride_, has_rows_ ? rows_.get() : first, has_rows_ ? width_ : step, num_offsets,
                   width_);
  const int64_t end = padded(num_offsets);
  for (int64_t c = 0; c < width_; ++c) std::fill_n(columns_.get() + c * stride_ + end, kColumnsBeyond, 0.0f);
}

PositionTables::PositionTables(const AttentionShape& shape, const std::vector<Sequence>& sequences) : shape_(shape) {
  if (keys().data == nullptr && queries().data == nullptr) return;
  if (shape.num_distances < 1 || shape.num_distances % 2 == 0) {
    throw std::invalid_argument("relative_keys, relative_queries: expected an odd number of rows (2M - 1), got " +
                                std::to_string(shape.num_distances));
  }
  if (shape.num_q_tokens == 0 || shape.num_k_tokens == 0) return;
  if (shape.coords_q.data == nullptr || shape.coords_k.data == nullptr) {
    throw std::invalid_argument(
        "coords_q, coords_k: relative positions need the position of every token, got address 0");
  }
  positions_q_ = positions_of(shape.coords_q, shape.num_q_tokens);
  positions_k_ = positions_of(shape.coords_k, shape.num_k_tokens);
  for (const Sequence& sequence : sequences) {
    if (sequence.num_q == 0 || sequence.num_k == 0) continue;
    const Range reach = reach_of(sequence);
    if (-reach.lowest > middle() || reach.highest > middle()) {
      throw std::invalid_argument("coords_q, coords_k: expected queries and keys of a sequence at most " +
                                  std::to_string(middle()) +
                                  " positions apart (tables of 2M - 1 = " + std::to_string(shape.num_distances) +
                                  " rows), got " + std::to_string(std::max(-reach.lowest, reach.highest)));
    }
    reach_ = exist() ? Range{std::min(reach_.lowest, reach.lowest), std::max(reach_.highest, reach.highest)} : reach;
    max_distances_ = std::max(max_distances_, reach.size());
  }
}

Range PositionTables::reach_of(const Sequence& sequence) const {
  const Range q = range_of(queries_at(sequence.first_q), sequence.num_q);
  const Range k = range_of(keys_at(sequence.first_k), sequence.num_k);
  return {q.lowest - k.highest, q.highest - k.lowest};
}

void ScoreBlock::clear_room(int64_t num_rows, int64_t width) const {
  std::fill_n(scores_.get(), kBefore, 0.0f);
  float* row = get();
  const int64_t step = stride(width);
  for (int64_t i = 0; i < num_rows; ++i, row += step) std::fill(row + width, row + step, 0.0f);
}

RelativeScores::RelativeScores(const Kernels& kernel, const PositionTables& tables, int64_t head_dim, int64_t max_rows,
                               bool is_backward)
    : kernel_(kernel),
      tables_(tables),
      d_(head_dim),
      d_width_(padded(head_dim)),
      turned_(tables.exist() ? kKeyRows : 0, padded(max_rows), true) {
  if (!tables.exist()) return;
  for (const bool is_of_queries : {true, false}) {
    if ((is_of_queries ? tables.keys() : tables.queries()).data == nullptr) continue;
    (is_of_queries ? of_queries_ : of_keys_).emplace(Term{{tables.max_distances(), d_, is_backward}});
  }
}

void RelativeScores::start(const Sequence& sequence, int64_t head, const TableGradients& gradients) {
  if (!tables_.exist() || sequence.num_q == 0 || sequence.num_k == 0) return;
  queries_ = tables_.queries_at(sequence.first_q);
  keys_ = tables_.keys_at(sequence.first_k);
  are_neighbours_ = follow_one_another(queries_, sequence.num_q) && follow_one_another(keys_, sequence.num_k);
  const Range all = tables_.reach(), reach = tables_.reach_of(sequence);
  if (of_queries_) {  // offsets are distances with their signs turned
    const RelativeTable& table = tables_.keys();
    of_queries_->vectors.lay_out(
        kernel_, table.data + head * table.head_stride + (tables_.middle() + reach.highest) * table.row_stride,
        -table.row_stride, reach.size());
    of_queries_->lowest = -reach.highest;
    of_queries_->lowest_gradient = -all.highest;
    of_queries_->gradients = gradients.keys;
  }
  if (of_keys_) {
    const RelativeTable& table = tables_.queries();
    of_keys_->vectors.lay_out(
        kernel_, table.data + head * table.head_stride + (tables_.middle() + reach.lowest) * table.row_stride,
        table.row_stride, reach.size());
    of_keys_->lowest = reach.lowest;
    of_keys_->lowest_gradient = all.lowest;
    of_keys_->gradients = gradients.queries;
  }
}

bool RelativeScores::put(const RelativeBlock& block, const ScoreBlock& scores) {
  if (!tables_.exist()) return false;
  if (block.num_k == 0) return true;
  const int64_t m = block.num_q, width = padded(block.num_k), stride = scores.stride(width);
  const Tokens queries{queries_ + block.first_q, m}, keys{keys_, block.num_k};
  if (of_keys_) {
    const int64_t turned_width = padded(m), turned_stride = turned_.stride(turned_width);
    for (int64_t key = 0; key < block.num_k; key += kKeyRows) {
      const Tokens rows{keys_ + key, std::min(kKeyRows, block.num_k - key)};
      multiply(*of_keys_, block.k + key * block.k_stride, block.k_stride, rows, queries, turned_.get(), turned_stride,
               false);
      kernel_.transpose(scores.get() + key, stride, turned_.get(), turned_stride, rows.count, turned_width);
    }
    if (of_queries_) scores.clear_room(m, width);
  }
  if (of_queries_) {
    for (int64_t row = 0; row < m; row += kQueryRows) {
      const Tokens rows{queries.positions + row, std::min(kQueryRows, m - row)};
      multiply(*of_queries_, block.q + row * block.q_stride, block.q_stride, rows, keys, scores.get() + row * stride,
               stride, of_keys_.has_value());
    }
  }
  return true;
}

void RelativeScores::add_gradients(const RelativeBlock& block, const ScoreBlock& dscores, float* dq, int64_t dq_stride,
                                   float* dk, int64_t dk_stride) {
  if (!tables_.exist() || block.num_k == 0) return;
  const int64_t m = block.num_q, width = padded(block.num_k), stride = dscores.stride(width);
  const Tokens queries{queries_ + block.first_q, m}, keys{keys_, block.num_k};
  if (of_queries_) {
    dscores.clear_room(m, width);
    for (int64_t row = 0; row < m; row += kQueryRows) {
      const Tokens rows{queries.positions + row, std::min(kQueryRows, m - row)};
      multiply_back(*of_queries_, block.q + row * d_width_, rows, keys, dscores.get() + row * stride, stride,
                    dq + row * dq_stride, dq_stride);
    }
  }
  if (of_keys_) {
    const int64_t turned_width = padded(m), turned_stride = turned_.stride(turned_width);
    for (int64_t key = 0; key < block.num_k; key += kKeyRows) {
      const Tokens rows{keys_ + key, std::min(kKeyRows, block.num_k - key)};
      kernel_.transpose(turned_.get(), turned_stride, dscores.get() + key, stride, m, kKeyRows);
      turned_.clear_room(rows.count, turned_width);
      multiply_back(*of_keys_, block.k + key * d_width_, rows, queries, turned_.get(), turned_stride,
                    dk + key * dk_stride, dk_stride);
    }
  }
}

RelativeScores::Product RelativeScores::product_of(Tokens rows, Tokens others, float* scores, int64_t stride) {
  const auto range = [&](const Tokens& tokens) {
    return are_neighbours_ ? Range{tokens.positions[0], tokens.positions[tokens.count - 1]}
                           : range_of(tokens.positions, tokens.count);
  };
  const Range of_rows = range(rows), of_others = range(others);
  const int64_t first = of_others.lowest - of_rows.highest, count = of_others.highest - of_rows.lowest - first + 1;
  if (are_neighbours_) return {first, count, scores - (rows.count - 1), stride + 1};
  const int64_t width = padded(count);
  product_.resize(std::max(product_.size(), static_cast<size_t>(rows.count * width)));
  return {first, count, product_.data(), width};
}

void RelativeScores::multiply(const Term& term, const float* x, int64_t x_stride, Tokens rows, Tokens others,
                              float* scores, int64_t stride, bool accumulate) {
  const Product product = product_of(rows, others, scores, stride);
  kernel_.matmul({rows.count, padded(product.num_offsets), d_, x, x_stride, 1,
                  term.vectors.columns(product.first_offset - term.lowest), term.vectors.stride(), product.data,
                  product.stride, accumulate && are_neighbours_});
  if (are_neighbours_) return;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* found = product.data + i * product.stride;
    const int64_t first = rows.positions[i] + product.first_offset;
    float* row = scores + i * stride;
    for (int64_t j = 0; j < others.count; ++j) {
      row[j] = (accumulate ? row[j] : 0.0f) + found[others.positions[j] - first];
    }
  }
}

void RelativeScores::multiply_back(const Term& term, const float* x, Tokens rows, Tokens others, float* dscores,
                                   int64_t stride, float* dx, int64_t dx_stride) {
  const Product product = product_of(rows, others, dscores, stride);
  if (!are_neighbours_) {
    std::fill_n(product.data, rows.count * product.stride, 0.0f);
    for (int64_t i = 0; i < rows.count; ++i) {
      float* found = product.data + i * product.stride;
      const int64_t first = rows.positions[i] + product.first_offset;
      for (int64_t j = 0; j < others.count; ++j) found[others.positions[j] - first] += dscores[i * stride + j];
    }
  }
  kernel_.matmul({rows.count, d_width_, product.num_offsets, product.data, product.stride, 1,
                  term.vectors.rows(product.first_offset - term.lowest), d_width_, dx, dx_stride, true});
  if (term.gradients == nullptr) return;
  float* gradients = term.gradients + (product.first_offset - term.lowest_gradient) * d_width_;
  kernel_.matmul({product.num_offsets, d_width_, rows.count, product.data, 1, product.stride, x, d_width_, gradients,
                  d_width_, true});
}

namespace {

std::vector<PieceTotals::Piece> pieces_by_head(const std::vector<Sequence>& sequences, int64_t num_heads) {
  std::vector<PieceTotals::Piece> pieces;
  pieces.reserve(sequences.size() * static_cast<size_t>(num_heads));
  for (int64_t head = 0; head < num_heads; ++head) {
    for (const Sequence& sequence : sequences) pieces.push_back({head, &sequence, head});
  }
  return pieces;
}

}  // namespace

TableTotals::TableTotals(const AttentionShape& shape, const PositionTables& tables,
                         const std::vector<Sequence>& sequences, const AttentionGradients& gradients)
    : tables_(tables),
      num_heads_(shape.num_heads),
      d_(shape.head_dim),
      num_distances_(shape.num_distances),
      dkeys_(gradients.drelative_keys),
      dqueries_(gradients.drelative_queries),
      table_size_(tables.reach().size() * padded(d_)),
      block_size_(((dkeys_ != nullptr) + (dqueries_ != nullptr)) * table_size_),
      blocks_(num_heads_ * block_size_),
      totals_(pieces_by_head(sequences, num_heads_), num_heads_, block_size_, blocks_.get()) {}

void TableTotals::finish(int num_threads) const {
  totals_.finish(num_threads);
  if (dkeys_ != nullptr) write(dkeys_, blocks_.get(), true, num_threads);
  if (dqueries_ != nullptr) {
    write(dqueries_, blocks_.get() + (dkeys_ == nullptr ? 0 : table_size_), false, num_threads);
  }
}

void TableTotals::write(float* gradient, const float* blocks, bool is_of_keys, int num_threads) const {
  const int64_t width = padded(d_), middle = (num_distances_ - 1) / 2, row_size = num_heads_ * d_;
  const Range reach = tables_.reach();
  split_range(num_distances_, useful_threads(num_distances_ * row_size, num_threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t distance = row - middle;
      float* of_heads = gradient + row * row_size;
      if (distance < reach.lowest || distance > reach.highest) {
        std::fill_n(of_heads, row_size, 0.0f);
        continue;
      }
      const int64_t offset = is_of_keys ? reach.highest - distance : distance - reach.lowest;
      for (int64_t head = 0; head < num_heads_; ++head) {
        std::copy_n(blocks + head * block_size_ + offset * width, d_, of_heads + head * d_);
      }
    }
  });
}

}  // namespace bert_fast::cpu
