#include "cpu/linear_int8.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/keep_bits.h"
#include "cpu/linear_blocks.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Rows that are rounded, and multiplied by one chunk of columns after the other: their bytes, and what becomes of them,
// stay in the second-level cache, and weights, which may not, come as often as there are blocks.
constexpr int64_t kBlockRows = 192;
// Chunks begin at multiples of this many columns: whole blocks of the layout, and whole tiles.
constexpr int64_t kChunkColumns = 4 * kInt8Columns;

class Worker {
 public:
  Worker(Rows<const float> x, Rows<float> y, int64_t k, int64_t most_rows)
      : x_(x),
        y_(y),
        k_(k),
        padded_(int8_padded(k)),
        bytes_(((most_rows + kInt8Rows - 1) / kInt8Rows * kInt8Rows * padded_ + 3) / 4),
        of_rows_(static_cast<size_t>(most_rows)) {}

  void round(int64_t row, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      of_rows_[static_cast<size_t>(i)] = int8_.quantize(x_.data + (row + i) * x_.stride, k_, q() + i * padded_);
    }
  }

  void multiply(const Chunk& chunk, int64_t rows, float* y) {
    const Weights& part = *chunk.part;
    int8_.linear({rows, chunk.num_columns, padded_, q(), of_rows_.data(), part.int8.packed + chunk.first * padded_,
                  part.int8.scale + chunk.first, part.int8.sums + chunk.first,
                  part.bias == nullptr ? nullptr : part.bias + chunk.first, y, y_.stride});
  }

 private:
  uint8_t* q() const { return reinterpret_cast<uint8_t*>(bytes_.get()); }

  const Int8Kernels& int8_ = int8_kernels();
  const Rows<const float> x_;
  const Rows<float> y_;
  const int64_t k_, padded_;
  const Scratch bytes_;
  std::vector<Int8Row> of_rows_;
};

}  // namespace

void linear_int8(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
                 const Activation* activation, int num_threads) {
  require_shape(num_rows, k);
  if (k > kMaxInt8Features) {
    throw std::invalid_argument("k: expected at most " + std::to_string(kMaxInt8Features) + ", got " +
                                std::to_string(k));
  }
  int64_t num_columns = 0;
  for (const Weights* part = parts; part < parts + num_parts; ++part) {
    require_shape(part->num_columns, k);
    require_address("packed", part->int8.packed, part->num_columns * k);
    require_address("scale", part->int8.scale, part->num_columns);
    require_address("sums", part->int8.sums, part->num_columns);
    num_columns += part->num_columns;
  }
  require_address("x", x.data, num_rows * k);
  require_address("y", y.data, num_rows * num_columns);
  if (num_rows == 0 || num_columns == 0) return;
  const int threads = useful_threads(num_columns * std::max<int64_t>(k, 1) / 4, num_threads);
  multiply_in_blocks(chunks_of(parts, num_parts, threads, kChunkColumns), y, num_rows, kBlockRows, activation, threads,
                     [&](int64_t most_rows) { return Worker(x, y, k, most_rows); });
}

}  // namespace bert_fast::cpu
