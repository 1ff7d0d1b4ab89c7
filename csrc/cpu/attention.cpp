#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Query rows per block. Forward: scores of 24 rows against 512 keys are 48 KiB. Backward: P and dP of 96 rows are
// 384 KiB and each block adds to dk and dv once, so it wants more rows. Multiples of 6, the height of a product's tile.
constexpr int64_t kForwardRows = 24, kBackwardRows = 96;

int64_t padded(int64_t num_columns) { return (num_columns + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns; }

// Floats from one row of `width` scores to the next. A product reads a cache line or a few of each of head_dim rows;
// 512 bytes apart or a multiple of it, these lines share so few sets of the first-level cache that they evict each
// other.
int64_t row_stride(int64_t width) { return width % 128 == 0 ? width + 16 : width; }

// One sequence: its tokens in the packed tensors.
struct Sequence {
  int64_t first_q, num_q, first_k, num_k;
  int64_t cost() const { return (num_q + 8) * (num_k + 8); }
};

void require_sizes(const AttentionShape& shape) {
  if (shape.num_heads < 1) {
    throw std::invalid_argument("num_heads: expected at least 1, got " + std::to_string(shape.num_heads));
  }
  if (shape.head_dim < 1 || shape.head_dim > 256) {
    throw std::invalid_argument("head_dim: expected 1 to 256, got " + std::to_string(shape.head_dim));
  }
  if (shape.num_sequences < 0) {
    throw std::invalid_argument("num_sequences: expected at least 0, got " + std::to_string(shape.num_sequences));
  }
  if (shape.lse_stride < shape.num_q_tokens) {
    throw std::invalid_argument("lse_stride: expected at least the number of queries (" +
                                std::to_string(shape.num_q_tokens) + "), got " + std::to_string(shape.lse_stride));
  }
}

// Walks over offsets, which must rise from 0 to num_tokens; throws std::invalid_argument where they do not.
class Offsets {
 public:
  Offsets(const char* name, const int32_t* data, int64_t num_tokens) : name_(name), data_(data), last_(num_tokens) {
    require_address(name, data, 1);
    end_ = *data_;
    if (end_ != 0) refuse();
  }

  // Where the sequences so far end.
  int64_t end() const { return end_; }

  // The length of the next sequence.
  int64_t next() {
    const int64_t begin = end_;
    end_ = *++data_;
    if (end_ < begin || end_ > last_) refuse();
    return end_ - begin;
  }

  void require_end() const {
    if (end_ != last_) refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    throw std::invalid_argument(std::string(name_) + ": expected offsets that rise from 0 to the number of tokens (" +
                                std::to_string(last_) + "), got " + std::to_string(end_));
  }

  const char* name_;
  const int32_t* data_;
  int64_t last_, end_ = 0;
};

// The batch cut into (sequence, head) pieces, longest first, handed out one by one.
class Work {
 public:
  Work(const AttentionShape& shape, const DropoutSpec& spec, int num_threads) : num_heads_(shape.num_heads) {
    require_sizes(shape);
    const bool any_q = shape.num_q_tokens > 0, any_k = shape.num_k_tokens > 0;
    if (any_q && any_k) require_attention_coords(spec, shape.coords_q, shape.coords_k, shape.causal);
    int64_t total_cost = 0;  // in the unit of kMinElementsPerThread: 4 multiply-adds count as one element
    Offsets offsets_q("cu_seqlens_q", shape.cu_seqlens_q, shape.num_q_tokens);
    Offsets offsets_k("cu_seqlens_k", shape.cu_seqlens_k, shape.num_k_tokens);
    sequences_.reserve(static_cast<size_t>(shape.num_sequences));
    for (int64_t i = 0; i < shape.num_sequences; ++i) {
      const int64_t first_q = offsets_q.end(), num_q = offsets_q.next();
      const int64_t first_k = offsets_k.end(), num_k = offsets_k.next();
      if (shape.causal && any_q && any_k) require_ascending(shape.coords_k, first_k, num_k);
      sequences_.push_back({first_q, num_q, first_k, num_k});
      max_keys_ = std::max(max_keys_, num_k);
      total_cost += sequences_.back().cost() * shape.num_heads * shape.head_dim / 4;
    }
    offsets_q.require_end();
    offsets_k.require_end();
    std::stable_sort(sequences_.begin(), sequences_.end(),
                     [](const Sequence& a, const Sequence& b) { return a.cost() > b.cost(); });
    const int64_t num_pieces = shape.num_sequences * num_heads_;
    num_threads_ = static_cast<int>(std::clamp<int64_t>(num_pieces, 1, useful_threads(total_cost, num_threads)));
  }

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

// dst [num_rows, padded(n)] dense, zeros beyond n. Rows of packed tensors lie a power of two apart and would evict each
// other.
void gather_rows(float* dst, const float* src, int64_t src_stride, int64_t num_rows, int64_t n) {
  const int64_t width = padded(n);
  for (int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(dst + i * width, src + i * src_stride, static_cast<size_t>(n) * sizeof(float));
  }
  if (width == n) return;
  for (int64_t i = 0; i < num_rows; ++i) std::fill(dst + i * width + n, dst + (i + 1) * width, 0.0f);
}

// dst [padded(n), dst_stride]: the transpose of num_rows rows, by way of `rows` where they do not fill whole vectors.
void transpose_rows(const Kernels& kernel, float* dst, int64_t dst_stride, const float* src, int64_t src_stride,
                    int64_t num_rows, int64_t n, float* rows) {
  const int64_t width = padded(n);
  if (width != n) gather_rows(rows, src, src_stride, num_rows, n);
  kernel.transpose(dst, dst_stride, width == n ? src : rows, width == n ? src_stride : width, num_rows, width);
}

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
  const int64_t max_width = padded(work.max_keys()), max_stride = row_stride(max_width);
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    const Scratch k_transposed(d_width * max_stride), v_rows(d_width * max_width), scores(kForwardRows * max_stride);
    ResultRows out_rows(out, d, kForwardRows);
    work.take([&](const Sequence& sequence, int64_t head, bool has_next_head) {
      const int64_t num_keys = sequence.num_k, first_k = sequence.first_k, stride = row_stride(padded(num_keys));
      transpose_rows(kernel, k_transposed.get(), stride, k.at(first_k, head, d), k.stride, num_keys, d, v_rows.get());
      gather_rows(v_rows.get(), v.at(first_k, head, d), v.stride, num_keys, d);
      for (int64_t begin = 0; begin < sequence.num_q; begin += kForwardRows) {
        const int64_t m = std::min(kForwardRows, sequence.num_q - begin), token = sequence.first_q + begin;
        const int64_t seen = rows.visible_keys(token, m, first_k, num_keys), width = padded(seen);
        kernel.matmul(
            {m, width, d, q.at(token, head, d), q.stride, 1, k_transposed.get(), stride, scores.get(), stride, false});
        for (int64_t i = 0; i < m; ++i) {
          if (has_next_head) {
            prefetch_row(q, token + i, head + 1, d);
            prefetch_row(out, token + i, head + 1, d);
            if (begin + i < num_keys) {
              for (const Packed<const float>& x : {k, v}) prefetch_row(x, first_k + begin + i, head + 1, d);
            }
          }
          float* row = scores.get() + i * stride;
          lse[head * shape.lse_stride + token + i] =
              kernel.softmax_forward(row, rows.prepare(token + i, head, first_k, seen, width));
        }
        out_rows.start(token, head);
        kernel.matmul({m, d_width, seen, scores.get(), stride, 1, v_rows.get(), d_width, out_rows.data(),
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
  Work work(shape, spec, num_threads);
  const int64_t max_width = padded(work.max_keys()), max_stride = row_stride(max_width);
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    const Scratch k_transposed(d_width * max_stride), v_transposed(d_width * max_stride), k_rows(d_width * max_width);
    const Scratch q_rows(d_width * kBackwardRows), dout_rows(d_width * kBackwardRows);
    const Scratch probs(kBackwardRows * max_stride), dscores(kBackwardRows * max_stride);
    ResultRows dq(gradients.dq, d, kBackwardRows), dk(gradients.dk, d, max_width), dv(gradients.dv, d, max_width);
    work.take([&](const Sequence& sequence, int64_t head, bool has_next_head) {
      const int64_t num_keys = sequence.num_k, first_k = sequence.first_k, stride = row_stride(padded(num_keys));
      transpose_rows(kernel, v_transposed.get(), stride, v.at(first_k, head, d), v.stride, num_keys, d, k_rows.get());
      transpose_rows(kernel, k_transposed.get(), stride, k.at(first_k, head, d), k.stride, num_keys, d, k_rows.get());
      gather_rows(k_rows.get(), k.at(first_k, head, d), k.stride, num_keys, d);
      for (ResultRows* result : {&dk, &dv}) {
        result->start(first_k, head);
        // Where a block of queries may not reach all keys, or there is none.
        if (shape.causal || sequence.num_q == 0) result->fill_zero(num_keys);
      }
      for (int64_t begin = 0; begin < sequence.num_q; begin += kBackwardRows) {
        const int64_t m = std::min(kBackwardRows, sequence.num_q - begin), token = sequence.first_q + begin;
        const int64_t seen = rows.visible_keys(token, m, first_k, num_keys), width = padded(seen);
        gather_rows(q_rows.get(), q.at(token, head, d), q.stride, m, d);
        gather_rows(dout_rows.get(), dout.at(token, head, d), dout.stride, m, d);
        kernel.matmul({m, width, d, q_rows.get(), d_width, 1, k_transposed.get(), stride, probs.get(), stride, false});
        kernel.matmul(
            {m, width, d, dout_rows.get(), d_width, 1, v_transposed.get(), stride, dscores.get(), stride, false});
        for (int64_t i = 0; i < m; ++i) {
          if (has_next_head) {
            for (const Packed<const float>& x : {q, dout}) prefetch_row(x, token + i, head + 1, d);
            if (begin + i < num_keys) {
              for (const Packed<const float>& x : {k, v}) prefetch_row(x, first_k + begin + i, head + 1, d);
            }
          }
          float* row = probs.get() + i * stride;
          kernel.softmax_backward(row, dscores.get() + i * stride, lse[head * shape.lse_stride + token + i],
                                  rows.prepare(token + i, head, first_k, seen, width));
        }
        dq.start(token, head);
        kernel.matmul(
            {m, d_width, seen, dscores.get(), stride, 1, k_rows.get(), d_width, dq.data(), dq.stride(), false});
        dq.store(m);
        const bool add = shape.causal || begin > 0;
        kernel.matmul(
            {seen, d_width, m, probs.get(), 1, stride, dout_rows.get(), d_width, dv.data(), dv.stride(), add});
        kernel.matmul({seen, d_width, m, dscores.get(), 1, stride, q_rows.get(), d_width, dk.data(), dk.stride(), add});
      }
      for (ResultRows* result : {&dk, &dv}) result->store(num_keys);
    });
  });
}

}  // namespace bert_fast::cpu
