#include "cpu/attention.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "cpu/attention_bias.h"
#include "cpu/attention_rows.h"
#include "cpu/attention_tables.h"
#include "cpu/attention_totals.h"
#include "cpu/attention_work.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Query rows per block. Forward: scores of 24 rows against 512 keys are 48 KiB. Backward: P and dP of 96 rows are
// 384 KiB and each block adds to dk and dv once, so it wants more rows. Multiples of 6, the height of a product's tile.
constexpr int64_t kForwardRows = 24, kBackwardRows = 96;
// Forward with tables: keys are multiplied with a window of the distances to all rows of a block, see
// attention_tables.h.
constexpr int64_t kRelativeRows = 96;

// The rows of one head of a result, to be written in vectors of kMatmulColumns: in place where a head size is a
// multiple of them, else in scratch rows that store() copies.
class ResultRows {
 public:
  ResultRows(Packed<float> x, int64_t head_dim, int64_t max_rows)
      : x_(x), d_(head_dim), width_(padded(head_dim)), scratch_(width_ == d_ ? 0 : width_ * max_rows) {}

  void start(int64_t first_token, int64_t head) { place_ = x_.at(first_token, head, d_); }
  float* data() const { return width_ == d_ ? place_ : scratch_.get(); }
  int64_t stride() const { return width_ == d_ ? x_.stride : width_; }
  void fill_zero(int64_t num_rows) {
    for (int64_t i = 0; i < num_rows; ++i) std::fill_n(data() + i * stride(), width_, 0.0f);
  }
  void store(int64_t num_rows) {
    if (width_ == d_) return;
    for (int64_t i = 0; i < num_rows; ++i) std::copy_n(data() + i * width_, d_, place_ + i * x_.stride);
  }

 private:
  Packed<float> x_;
  int64_t d_, width_;
  Scratch scratch_;
  float* place_ = nullptr;
};

// Asks for a row of the next head before it is needed: rows lie a token's stride apart, where no hardware prefetcher
// looks, and short sequences wait for memory more than they compute. To be called once per row of the present head:
// asked for all at once, the rows would queue.
template <class T>
void prefetch_row(Packed<T> x, int64_t token, int64_t head, int64_t head_dim) {
  constexpr int64_t kFloatsPerLine = 16;
  constexpr int kForWriting = std::is_const_v<T> ? 0 : 1;
  const T* row = x.at(token, head, head_dim);
  for (int64_t c = 0; c < head_dim; c += kFloatsPerLine) __builtin_prefetch(row + c, kForWriting, 2);
}

void require_tables_of(const AttentionGradients& gradients, const AttentionShape& shape) {
  if ((gradients.drelative_keys != nullptr && shape.relative_keys.data == nullptr) ||
      (gradients.drelative_queries != nullptr && shape.relative_queries.data == nullptr)) {
    throw std::invalid_argument("relative_keys, relative_queries: expected the tables whose gradients are wanted");
  }
}

}  // namespace

void attention_forward(Packed<const float> q, Packed<const float> k, Packed<const float> v, Packed<float> out,
                       float* lse, const AttentionShape& shape, const DropoutSpec& spec, int num_threads) {
  const Kernels& kernel = kernels();
  const int64_t d = shape.head_dim, d_width = padded(d);
  require_address("q", q.data, shape.num_q_tokens);
  require_address("k", k.data, shape.num_k_tokens);
  require_address("v", v.data, shape.num_k_tokens);
  require_address("out", out.data, shape.num_q_tokens);
  require_address("lse", lse, shape.num_q_tokens);
  Work work(shape, spec, num_threads);
  const BiasPlaces places(shape);
  const PositionTables tables(shape, work.sequences());
  const int64_t block_rows = tables.exist() ? kRelativeRows : kForwardRows;
  const int64_t max_width = padded(work.max_keys()), max_stride = row_stride(max_width);
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    BiasRows bias(shape.bias, places, work.max_keys());
    RelativeScores relative(kernel, tables, d, block_rows, false);
    const Scratch k_transposed(d_width * max_stride), v_rows(d_width * max_width);
    const ScoreBlock scores(block_rows, max_width, tables.exist());
    ResultRows out_rows(out, d, block_rows);
    work.take([&](const Sequence& sequence, int64_t head, bool has_next_head) {
      const int64_t num_keys = sequence.num_k, first_k = sequence.first_k, stride = row_stride(padded(num_keys));
      transpose_rows(kernel, k_transposed.get(), stride, k.at(first_k, head, d), k.stride, num_keys, d, v_rows.get());
      gather_rows(v_rows.get(), v.at(first_k, head, d), v.stride, num_keys, d);
      bias.start(sequence, head);
      relative.start(sequence, head);
      for (int64_t begin = 0; begin < sequence.num_q; begin += block_rows) {
        const int64_t m = std::min(block_rows, sequence.num_q - begin), token = sequence.first_q + begin;
        const int64_t seen = rows.visible_keys(token, m, first_k, num_keys), width = padded(seen);
        const int64_t score_stride = scores.stride(width);
        const bool is_put =
            relative.put({begin, m, seen, q.at(token, head, d), q.stride, k.at(first_k, head, d), k.stride}, scores);
        kernel.matmul({m, width, d, q.at(token, head, d), q.stride, 1, k_transposed.get(), stride, scores.get(),
                       score_stride, is_put});
        for (int64_t i = 0; i < m; ++i) {
          if (has_next_head) {
            prefetch_row(q, token + i, head + 1, d);
            prefetch_row(out, token + i, head + 1, d);
            if (begin + i < num_keys) {
              for (const Packed<const float>& x : {k, v}) prefetch_row(x, first_k + begin + i, head + 1, d);
            }
          }
          float* row = scores.get() + i * score_stride;
          SoftmaxRow softmax = rows.prepare(token + i, head, first_k, seen, width);
          softmax.bias = bias.row(token + i, softmax.num_keys);
          lse[head * shape.lse_stride + token + i] = kernel.softmax_forward(row, softmax);
        }
        out_rows.start(token, head);
        kernel.matmul({m, d_width, seen, scores.get(), score_stride, 1, v_rows.get(), d_width, out_rows.data(),
                       out_rows.stride(), false});
        out_rows.store(m);
      }
    });
  });
}

void attention_backward(Packed<const float> dout, Packed<const float> q, Packed<const float> k, Packed<const float> v,
                        const float* lse, const AttentionGradients& gradients, const AttentionShape& shape,
                        const DropoutSpec& spec, int num_threads) {
  const Kernels& kernel = kernels();
  const int64_t d = shape.head_dim, d_width = padded(d);
  require_address("dout", dout.data, shape.num_q_tokens);
  require_address("q", q.data, shape.num_q_tokens);
  require_address("k", k.data, shape.num_k_tokens);
  require_address("v", v.data, shape.num_k_tokens);
  require_address("lse", lse, shape.num_q_tokens);
  require_address("dq", gradients.dq.data, shape.num_q_tokens);
  require_address("dk", gradients.dk.data, shape.num_k_tokens);
  require_address("dv", gradients.dv.data, shape.num_k_tokens);
  const bool wants_tables = gradients.drelative_keys != nullptr || gradients.drelative_queries != nullptr;
  if (wants_tables) require_tables_of(gradients, shape);
  if (wants_tables && gradients.dbias != nullptr) {  // each is added up in an order of its own
    AttentionGradients others = gradients;
    others.dbias = nullptr;
    attention_backward(dout, q, k, v, lse, others, shape, spec, num_threads);
    others = gradients;
    others.drelative_keys = others.drelative_queries = nullptr;
    attention_backward(dout, q, k, v, lse, others, shape, spec, num_threads);
    return;
  }
  Work work(shape, spec, num_threads);
  const BiasPlaces places(shape);
  const PositionTables tables(shape, work.sequences());
  const int64_t max_width = padded(work.max_keys()), max_stride = row_stride(max_width);
  std::optional<PieceTotals> of_bias;
  if (gradients.dbias != nullptr) {
    const int64_t (&sizes)[4] = shape.bias.sizes;
    of_bias.emplace(bias_pieces(shape.bias, places, work.sequences(), shape.num_heads), sizes[0] * sizes[1],
                    sizes[2] * sizes[3], gradients.dbias);
  }
  std::optional<TableTotals> of_tables;
  if (wants_tables) of_tables.emplace(shape, tables, work.sequences(), gradients);
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    BiasRows bias(shape.bias, places, work.max_keys());
    const Scratch k_transposed(d_width * max_stride), v_transposed(d_width * max_stride), k_rows(d_width * max_width);
    const Scratch q_rows(d_width * kBackwardRows), dout_rows(d_width * kBackwardRows);
    RelativeScores relative(kernel, tables, d, kBackwardRows, true);
    const ScoreBlock probs(kBackwardRows, max_width, tables.exist()), dscores(kBackwardRows, max_width, tables.exist());
    ResultRows dq(gradients.dq, d, kBackwardRows), dk(gradients.dk, d, max_width), dv(gradients.dv, d, max_width);
    const auto visit = [&](const Sequence& sequence, int64_t head, bool has_next_head, float* dbias,
                           const TableGradients& dtables) {
      const int64_t num_keys = sequence.num_k, first_k = sequence.first_k, stride = row_stride(padded(num_keys));
      transpose_rows(kernel, v_transposed.get(), stride, v.at(first_k, head, d), v.stride, num_keys, d, k_rows.get());
      transpose_rows(kernel, k_transposed.get(), stride, k.at(first_k, head, d), k.stride, num_keys, d, k_rows.get());
      gather_rows(k_rows.get(), k.at(first_k, head, d), k.stride, num_keys, d);
      for (ResultRows* result : {&dk, &dv}) {
        result->start(first_k, head);
        // Where a block of queries may not reach all keys, or there is none.
        if (shape.causal || sequence.num_q == 0) result->fill_zero(num_keys);
      }
      bias.start(sequence, head, dbias);
      relative.start(sequence, head, dtables);
      for (int64_t begin = 0; begin < sequence.num_q; begin += kBackwardRows) {
        const int64_t m = std::min(kBackwardRows, sequence.num_q - begin), token = sequence.first_q + begin;
        const int64_t seen = rows.visible_keys(token, m, first_k, num_keys), width = padded(seen);
        gather_rows(q_rows.get(), q.at(token, head, d), q.stride, m, d);
        gather_rows(dout_rows.get(), dout.at(token, head, d), dout.stride, m, d);
        const int64_t score_stride = probs.stride(width);
        const RelativeBlock block{begin, m, seen, q_rows.get(), d_width, k_rows.get(), d_width};
        const bool is_put = relative.put(block, probs);
        kernel.matmul(
            {m, width, d, q_rows.get(), d_width, 1, k_transposed.get(), stride, probs.get(), score_stride, is_put});
        kernel.matmul(
            {m, width, d, dout_rows.get(), d_width, 1, v_transposed.get(), stride, dscores.get(), score_stride, false});
        for (int64_t i = 0; i < m; ++i) {
          if (has_next_head) {
            for (const Packed<const float>& x : {q, dout}) prefetch_row(x, token + i, head + 1, d);
            if (begin + i < num_keys) {
              for (const Packed<const float>& x : {k, v}) prefetch_row(x, first_k + begin + i, head + 1, d);
            }
          }
          float* row = probs.get() + i * score_stride;
          SoftmaxRow softmax = rows.prepare(token + i, head, first_k, seen, width);
          softmax.bias = bias.row(token + i, softmax.num_keys);
          softmax.dbias = bias.gradient_row(token + i, softmax.num_keys);
          kernel.softmax_backward(row, dscores.get() + i * score_stride, lse[head * shape.lse_stride + token + i],
                                  softmax);
          bias.finish_gradient_row(token + i, softmax.num_keys);
        }
        dq.start(token, head);
        kernel.matmul(
            {m, d_width, seen, dscores.get(), score_stride, 1, k_rows.get(), d_width, dq.data(), dq.stride(), false});
        const bool add = shape.causal || begin > 0;
        kernel.matmul(
            {seen, d_width, m, probs.get(), 1, score_stride, dout_rows.get(), d_width, dv.data(), dv.stride(), add});
        kernel.matmul(
            {seen, d_width, m, dscores.get(), 1, score_stride, q_rows.get(), d_width, dk.data(), dk.stride(), add});
        relative.add_gradients(block, dscores, dq.data(), dq.stride(), dk.data(), dk.stride());
        dq.store(m);
      }
      for (ResultRows* result : {&dk, &dv}) result->store(num_keys);
    };
    if (of_bias) {
      of_bias->take(
          [&](const Sequence& sequence, int64_t head, float* dbias) { visit(sequence, head, false, dbias, {}); });
    } else if (of_tables) {
      of_tables->take([&](const Sequence& sequence, int64_t head, const TableGradients& dtables) {
        visit(sequence, head, false, nullptr, dtables);
      });
    } else {
      work.take(
          [&](const Sequence& sequence, int64_t head, bool has_next) { visit(sequence, head, has_next, nullptr, {}); });
    }
  });
  if (of_bias) of_bias->finish(num_threads);
  if (of_tables) of_tables->finish(num_threads);
}

}  // namespace bert_fast::cpu
