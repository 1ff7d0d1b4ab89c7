// Relative positions of attention: vectors for every distance between a query and a key (He et al. 2020,
// arXiv:2006.03654), and their gradients.
//
// Queries are multiplied with relative_keys, keys with relative_queries. Either way r rows x meet n others, and the
// vectors of a table lie in the order of the offset: position of the other - position of the row. A window of n + r - 1
// of them holds all that r rows need, and where positions follow one another, row i's score with other j stands in
// column r - 1 - i + j of the product, so that rows one float closer to each other make it the matrix [r, n]:
//
//    r = 3, n = 4   . . 0 1 2 3        0 1 2 3 . .
//                   . 0 1 2 3 .   =    0 1 2 3 . .   from the first row's 0 on, with a stride that is less by 1
//                   0 1 2 3 . .        0 1 2 3
//
// So scores are found in place, nothing is gathered, and gradients of scores, with zeros between the rows, are the
// gradients of the product. Where positions have holes, scores are gathered from the product one by one.

#ifndef BERT_FAST_CPU_ATTENTION_TABLES_H_
#define BERT_FAST_CPU_ATTENTION_TABLES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/attention_rows.h"
#include "cpu/attention_totals.h"
#include "cpu/attention_work.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {

// The vectors of one table and head that a sequence can reach, in the order of the offset: as columns for scores, as
// rows for gradients.
class OffsetVectors {
 public:
  OffsetVectors(int64_t max_offsets, int64_t head_dim, bool has_rows);

  // first: the vector of the lowest offset; step: floats from one offset's vector to the next's. Where it is given what
  // it holds already, nothing is done.
  void lay_out(const Kernels& kernel, const float* first, int64_t step, int64_t num_offsets);

  // [head_dim, ...] from this offset on, rows `stride` floats apart; up to 32 floats more than there are may be read.
  const float* columns(int64_t offset) const { return columns_.get() + offset; }
  int64_t stride() const { return stride_; }
  // [..., padded(head_dim)] from this offset on.
  const float* rows(int64_t offset) const { return rows_.get() + offset * width_; }

 private:
  int64_t d_, width_, stride_;
  bool has_rows_;
  Scratch columns_, rows_;  // rows where they are wanted, or do not fill whole vectors
  const float* first_ = nullptr;
  int64_t num_offsets_ = 0;
};

struct Range {
  int64_t lowest, highest;
  int64_t size() const { return highest - lowest + 1; }
};

// What threads share: the tables, and the positions of a call's tokens. Positions are copied once, so that another
// thread may write to the caller's array during the call.
class PositionTables {
 public:
  // Throws std::invalid_argument where a table has no row for a distance or an address is missing; without tables
  // nothing is read. shape must live as long.
  PositionTables(const AttentionShape& shape, const std::vector<Sequence>& sequences);

  // Whether there are tables, and distances to look up.
  bool exist() const { return reach_.size() > 0; }
  const RelativeTable& keys() const { return shape_.relative_keys; }
  const RelativeTable& queries() const { return shape_.relative_queries; }
  // The row of distance 0.
  int64_t middle() const { return (shape_.num_distances - 1) / 2; }
  // Distances of all sequences, of one, and how many one has at most.
  Range reach() const { return reach_; }
  Range reach_of(const Sequence& sequence) const;
  int64_t max_distances() const { return max_distances_; }
  const int32_t* queries_at(int64_t token) const { return positions_q_.data() + token; }
  const int32_t* keys_at(int64_t token) const { return positions_k_.data() + token; }

 private:
  const AttentionShape& shape_;
  std::vector<int32_t> positions_q_, positions_k_;
  Range reach_{0, -1};
  int64_t max_distances_ = 0;
};

// A block of scores with room before and between its rows, where products reach over them.
class ScoreBlock {
 public:
  static constexpr int64_t kBefore = 32, kBetween = 64;

  ScoreBlock(int64_t max_rows, int64_t max_width, bool has_room)
      : has_room_(has_room), scores_(kBefore + padded(max_rows) * stride(max_width)) {}

  float* get() const { return scores_.get() + kBefore; }
  // From row to row, for rows of `width` columns, a multiple of kMatmulColumns.
  int64_t stride(int64_t width) const { return row_stride(has_room_ ? width + kBetween : width); }
  // Sets the room around rows of `width` columns to 0.
  void clear_room(int64_t num_rows, int64_t width) const;

 private:
  bool has_room_;
  Scratch scores_;
};

// The gradients of a head's vectors, as rows of OffsetVectors; nullptr: not wanted.
struct TableGradients {
  float* keys = nullptr;
  float* queries = nullptr;
};

// A block of one sequence's queries, and the keys that it sees: the first num_k.
struct RelativeBlock {
  int64_t first_q, num_q, num_k;  // the first query by its number in the sequence
  const float* q;
  int64_t q_stride;
  const float* k;
  int64_t k_stride;
};

// One thread's scores of relative positions, of one sequence and head after the other.
class RelativeScores {
 public:
  // tables must live as long.
  RelativeScores(const Kernels& kernel, const PositionTables& tables, int64_t head_dim, int64_t max_rows,
                 bool is_backward);

  void start(const Sequence& sequence, int64_t head, const TableGradients& gradients = {});

  // Writes the block's relative scores, not yet scaled; false, and nothing is written, without tables.
  bool put(const RelativeBlock& block, const ScoreBlock& scores);

  // Adds what the gradients of the block's scores, zeros from num_k on, cause to dq, dk and the tables' gradients;
  // without tables nothing. Rows of q and k are padded(head_dim) wide, zeros beyond the head's; so are dq and dk.
  void add_gradients(const RelativeBlock& block, const ScoreBlock& dscores, float* dq, int64_t dq_stride, float* dk,
                     int64_t dk_stride);

 private:
  // Rows or others of a product.
  struct Tokens {
    const int32_t* positions;
    int64_t count;
  };
  // A product of rows with a window of vectors. Where positions follow one another it lies over the scores.
  struct Product {
    int64_t first_offset, num_offsets;  // of the window; the first as these sides count
    float* data;
    int64_t stride;
  };

  // A table, its vectors laid out from `lowest` on, and their gradients from `lowest_gradient` on.
  struct Term {
    OffsetVectors vectors;
    int64_t lowest = 0, lowest_gradient = 0;
    float* gradients = nullptr;
  };

  Product product_of(Tokens rows, Tokens others, float* scores, int64_t stride);
  void multiply(const Term& term, const float* x, int64_t x_stride, Tokens rows, Tokens others, float* scores,
                int64_t stride, bool accumulate);
  void multiply_back(const Term& term, const float* x, Tokens rows, Tokens others, float* dscores, int64_t stride,
                     float* dx, int64_t dx_stride);

  const Kernels& kernel_;
  const PositionTables& tables_;
  int64_t d_, d_width_;
  std::optional<Term> of_queries_, of_keys_;  // queries' products with relative_keys, and the other way round
  ScoreBlock turned_;                         // scores of a few keys, [keys, queries]
  std::vector<float> product_;
  const int32_t *queries_ = nullptr, *keys_ = nullptr;
  bool are_neighbours_ = true;
};

// The tables' gradients, added up over the sequences of every head.
class TableTotals {
 public:
  TableTotals(const AttentionShape& shape, const PositionTables& tables, const std::vector<Sequence>& sequences,
              const AttentionGradients& gradients);

  // Calls visit(sequence, head, gradients) until nothing is left; for several threads at once.
  template <class Visit>
  void take(const Visit& visit) {
    totals_.take([&](const Sequence& sequence, int64_t head, float* block) {
      float* queries = block + (dkeys_ == nullptr ? 0 : table_size_);
      visit(sequence, head,
            TableGradients{dkeys_ == nullptr ? nullptr : block, dqueries_ == nullptr ? nullptr : queries});
    });
  }

  // Writes the gradients, when every piece was visited.
  void finish(int num_threads) const;

 private:
  void write(float* gradient, const float* blocks, bool is_of_keys, int num_threads) const;

  const PositionTables& tables_;
  int64_t num_heads_, d_, num_distances_;
  float *dkeys_, *dqueries_;
  int64_t table_size_, block_size_;
  Scratch blocks_;  // [num_heads, block_size]
  PieceTotals totals_;
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_TABLES_H_
