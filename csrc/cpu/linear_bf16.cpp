#include "cpu/linear_bf16.h"

#include <algorithm>

#include "cpu/keep_bits.h"
#include "cpu/linear_blocks.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// What a block of rows of x takes: it stays in the second-level cache, and weights, which may not, come and are rounded
// as often as there are blocks.
constexpr int64_t kBlockBytes = 1 << 20;
// Chunks begin at multiples of this many columns: whole pairs of tiles. Columns that cannot be multiplied as they lie
// are copied as many at a time.
constexpr int64_t kChunkColumns = 2 * kBf16Columns;

class Worker {
 public:
  Worker(Rows<const float> x, Rows<float> y, int64_t k, int64_t most_rows)
      : x_(x),
        y_stride_(y.stride),
        k_(k),
        padded_(bf16_padded(k)),
        packed_((most_rows + kBf16Rows - 1) / kBf16Rows * kBf16Rows * padded_),
        copied_(kChunkColumns * padded_) {}

  void round(int64_t row, int64_t rows) {
    kernels_.pack(x_.data + row * x_.stride, x_.stride, rows, k_, packed_.get());
  }

  void multiply(const Chunk& chunk, int64_t rows, float* y) {
    const Weights& part = *chunk.part;
    const bool lie_well = part.bf16 != nullptr && k_ == padded_;
    const int64_t as_they_lie = lie_well ? chunk.num_columns / kBf16Columns * kBf16Columns : 0;
    if (as_they_lie > 0) {
      multiply(part, chunk.first, as_they_lie, rows, part.bf16 + chunk.first * part.stride, part.stride, y);
    }
    for (int64_t done = as_they_lie; done < chunk.num_columns; done += kChunkColumns) {
      const int64_t columns = std::min(kChunkColumns, chunk.num_columns - done);
      copy(part, chunk.first + done, columns);
      multiply(part, chunk.first + done, columns, rows, copied_.get(), padded_, y + done);
    }
  }

 private:
  void multiply(const Weights& part, int64_t first, int64_t columns, int64_t rows, const Bf16* weight, int64_t stride,
                float* y) {
    kernels_.linear({rows, columns, padded_, packed_.get(), weight, stride,
                     part.bias == nullptr ? nullptr : part.bias + first, y, y_stride_});
  }

  // In bf16, k padded with zeros.
  void copy(const Weights& part, int64_t first, int64_t columns) {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = (first + i) * part.stride;
      Bf16* const to = copied_.get() + i * padded_;
      if (part.bf16 == nullptr) {
        kernels_.round(part.weight + at, k_, to);
      } else {
        std::copy_n(part.bf16 + at, k_, to);
        std::fill_n(to + k_, padded_ - k_, Bf16{0});
      }
    }
    const int64_t readable = (columns + kBf16Columns - 1) / kBf16Columns * kBf16Columns;
    std::fill_n(copied_.get() + columns * padded_, (readable - columns) * padded_, Bf16{0});
  }

  const Bf16Kernels& kernels_ = bf16_kernels();
  const Rows<const float> x_;
  const int64_t y_stride_, k_, padded_;
  const Bf16Scratch packed_, copied_;
};

}  // namespace

void linear_bf16(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
                 const Activation* activation, int num_threads) {
  require_shape(num_rows, k);
  int64_t num_columns = 0;
  for (const Weights* part = parts; part < parts + num_parts; ++part) {
    require_shape(part->num_columns, k);
    if (part->is_rounded) {
      require_address("weight", part->weight, part->num_columns * k);
    } else {
      require_address("bf16", part->bf16, part->num_columns * k);
    }
    num_columns += part->num_columns;
  }
  require_address("x", x.data, num_rows * k);
  require_address("y", y.data, num_rows * num_columns);
  if (num_rows == 0 || num_columns == 0) return;
  const int threads = useful_threads(num_columns * std::max<int64_t>(k, 1) / 2, num_threads);
  const int64_t of_row = std::max<int64_t>(bf16_padded(k), 1) * static_cast<int64_t>(sizeof(Bf16));
  const int64_t block_rows = std::max<int64_t>(kBlockBytes / of_row / kBf16Rows, 1) * kBf16Rows;
  multiply_in_blocks(chunks_of(parts, num_parts, threads, kChunkColumns), y, num_rows, block_rows, activation, threads,
                     [&](int64_t most_rows) { return Worker(x, y, k, most_rows); });
}

}  // namespace bert_fast::cpu
