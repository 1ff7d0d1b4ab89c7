#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Query rows per block. Forward: scores of 24 rows against 512 keys are 48 KiB. Backward: P and dP of 96 rows are
// 384 KiB and each block adds to dk and dv once, so it wants more rows. Multiples of 6, the height of a product's tile.
constexpr int64_t kForwardRows = 24, kBackwardRows = 96;

// Uninitialised floats on a cache line's boundary: vector loads that cross lines cost twice.
class Scratch {
 public:
  explicit Scratch(int64_t size) {
    const size_t bytes = (static_cast<size_t>(size) * sizeof(float) + 127) / 64 * 64;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

int64_t padded(int64_t num_keys) { return (num_keys + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns; }

// One sequence: its tokens in the packed tensors.
struct Sequence {
  int64_t first_q, num_q, first_k, num_k;
  int64_t cost() const { return (num_q + 8) * (num_k + 8); }
};

// The batch cut into (sequence, head) pieces, longest first, handed out one by one.
class Work {
 public:
  Work(const AttentionShape& shape, const DropoutSpec& spec, int num_threads) : num_heads_(shape.num_heads) {
    if (shape.num_heads < 1) {
      throw std::invalid_argument("num_heads: expected at least 1, got " + std::to_string(shape.num_heads));
    }
    if (shape.head_dim < 16 || shape.head_dim > 256 || shape.head_dim % 16 != 0) {
      throw std::invalid_argument("head_dim: expected a multiple of 16 up to 256, got " +
                                  std::to_string(shape.head_dim));
    }
    const bool any_q = shape.cu_seqlens_q[shape.num_sequences] > 0;
    const bool any_k = shape.cu_seqlens_k[shape.num_sequences] > 0;
    if (any_q && any_k) require_attention_coords(spec, shape.coords_q, shape.coords_k, shape.causal);
    int64_t total_cost = 0;  // in the unit of kMinElementsPerThread: 4 multiply-adds count as one element
    for (int64_t i = 0; i < shape.num_sequences; ++i) {
      const int64_t first_q = shape.cu_seqlens_q[i], num_q = shape.cu_seqlens_q[i + 1] - first_q;
      const int64_t first_k = shape.cu_seqlens_k[i], num_k = shape.cu_seqlens_k[i + 1] - first_k;
      if (first_q < 0 || num_q < 0 || first_k < 0 || num_k < 0) {
        throw std::invalid_argument("cu_seqlens: expected increasing numbers from 0 on; sequence " + std::to_string(i) +
                                    " has " + std::to_string(num_q) + " queries and " + std::to_string(num_k) +
                                    " keys");
      }
      if (shape.causal && any_q && any_k) require_ascending(shape.coords_k, first_k, num_k);
      sequences_.push_back({first_q, num_q, first_k, num_k});
      max_keys_ = std::max(max_keys_, num_k);
      total_cost += sequences_.back().cost() * shape.num_heads * shape.head_dim / 4;
    }
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

// dst [num_rows, n] dense. Rows of packed tensors lie a power of two apart and would evict each other.
void gather_rows(float* dst, const float* src, int64_t src_stride, int64_t num_rows, int64_t n) {
  for (int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(dst + i * n, src + i * src_stride, static_cast<size_t>(n) * sizeof(float));
  }
}

// Asks for the rows of a head before they are needed: they lie a token's stride apart, where no hardware prefetcher
// looks. Short sequences wait for memory more than they compute.
template <class T>
void prefetch_head(Packed<T> x, int64_t first_token, int64_t num_tokens, int64_t head, int64_t head_dim) {
  constexpr int64_t kFloatsPerLine = 16;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const T* row = x.at(first_token + i, head, head_dim);
    for (int64_t c = 0; c < head_dim; c += kFloatsPerLine) __builtin_prefetch(row + c, 0, 2);
  }
}

}  // namespace

void attention_forward(Packed<const float> q, Packed<const float> k, Packed<const float> v, Packed<float> out,
                       float* lse, const AttentionShape& shape, const DropoutSpec& spec, int num_threads) {
  const Kernels& kernel = kernels();
  const int64_t d = shape.head_dim;
  Work work(shape, spec, num_threads);
  const int64_t max_width = padded(work.max_keys());
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    const Scratch k_transposed(d * max_width), v_rows(d * max_width), scores(kForwardRows * max_width);
    work.take([&](const Sequence& sequence, int64_t head, bool has_next_head) {
      const int64_t num_keys = sequence.num_k, width = padded(num_keys), first_k = sequence.first_k;
      if (has_next_head) {
        prefetch_head(q, sequence.first_q, sequence.num_q, head + 1, d);
        for (const Packed<const float>& x : {k, v}) prefetch_head(x, first_k, num_keys, head + 1, d);
      }
      kernel.transpose(k_transposed.get(), width, k.at(first_k, head, d), k.stride, num_keys, d);
      gather_rows(v_rows.get(), v.at(first_k, head, d), v.stride, num_keys, d);
      for (int64_t begin = 0; begin < sequence.num_q; begin += kForwardRows) {
        const int64_t m = std::min(kForwardRows, sequence.num_q - begin), token = sequence.first_q + begin;
        kernel.matmul(
            {m, width, d, q.at(token, head, d), q.stride, 1, k_transposed.get(), width, scores.get(), width, false});
        for (int64_t i = 0; i < m; ++i) {
          float* row = scores.get() + i * width;
          lse[head * shape.lse_stride + token + i] =
              kernel.softmax_forward(row, rows.prepare(token + i, head, first_k, num_keys, width));
        }
        kernel.matmul(
            {m, d, num_keys, scores.get(), width, 1, v_rows.get(), d, out.at(token, head, d), out.stride, false});
      }
    });
  });
}

void attention_backward(Packed<const float> dout, Packed<const float> q, Packed<const float> k, Packed<const float> v,
                        Packed<const float> out, const float* lse, const AttentionGradients& gradients,
                        const AttentionShape& shape, const DropoutSpec& spec, int num_threads) {
  const Kernels& kernel = kernels();
  const int64_t d = shape.head_dim;
  const Packed<float> dq = gradients.dq, dk = gradients.dk, dv = gradients.dv;
  Work work(shape, spec, num_threads);
  const int64_t max_width = padded(work.max_keys());
  run_threads(work.num_threads(), [&](int) {
    QueryRows rows(kernel, spec, shape.coords_q, shape.coords_k, shape.causal, shape.softmax_scale, max_width);
    const Scratch k_transposed(d * max_width), v_transposed(d * max_width), k_rows(d * max_width);
    const Scratch q_rows(d * kBackwardRows), dout_rows(d * kBackwardRows);
    const Scratch probs(kBackwardRows * max_width), dscores(kBackwardRows * max_width);
    work.take([&](const Sequence& sequence, int64_t head, bool has_next_head) {
      const int64_t num_keys = sequence.num_k, width = padded(num_keys), first_k = sequence.first_k;
      if (has_next_head) {
        for (const Packed<const float>& x : {q, dout, out}) {
          prefetch_head(x, sequence.first_q, sequence.num_q, head + 1, d);
        }
        for (const Packed<const float>& x : {k, v}) prefetch_head(x, first_k, num_keys, head + 1, d);
      }
      kernel.transpose(k_transposed.get(), width, k.at(first_k, head, d), k.stride, num_keys, d);
      kernel.transpose(v_transposed.get(), width, v.at(first_k, head, d), v.stride, num_keys, d);
      gather_rows(k_rows.get(), k.at(first_k, head, d), k.stride, num_keys, d);
      // At least one block, though it may be empty: that writes the zeros of keys that no query sees.
      for (int64_t begin = 0; begin == 0 || begin < sequence.num_q; begin += kBackwardRows) {
        const int64_t m = std::min(kBackwardRows, sequence.num_q - begin), token = sequence.first_q + begin;
        gather_rows(q_rows.get(), q.at(token, head, d), q.stride, m, d);
        gather_rows(dout_rows.get(), dout.at(token, head, d), dout.stride, m, d);
        kernel.matmul({m, width, d, q_rows.get(), d, 1, k_transposed.get(), width, probs.get(), width, false});
        kernel.matmul({m, width, d, dout_rows.get(), d, 1, v_transposed.get(), width, dscores.get(), width, false});
        for (int64_t i = 0; i < m; ++i) {
          float* row = probs.get() + i * width;
          const float delta = kernel.dot(dout_rows.get() + i * d, out.at(token + i, head, d), d);
          kernel.softmax_backward(row, dscores.get() + i * width, lse[head * shape.lse_stride + token + i], delta,
                                  rows.prepare(token + i, head, first_k, num_keys, width));
        }
        kernel.matmul(
            {m, d, num_keys, dscores.get(), width, 1, k_rows.get(), d, dq.at(token, head, d), dq.stride, false});
        const bool add = begin > 0;
        kernel.matmul(
            {num_keys, d, m, probs.get(), 1, width, dout_rows.get(), d, dv.at(first_k, head, d), dv.stride, add});
        kernel.matmul(
            {num_keys, d, m, dscores.get(), 1, width, q_rows.get(), d, dk.at(first_k, head, d), dk.stride, add});
      }
    });
  });
}

}  // namespace bert_fast::cpu
