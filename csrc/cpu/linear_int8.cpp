#include "cpu/linear_int8.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/keep_bits.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Rows that are rounded, and multiplied by one chunk of columns after the other: their bytes, and what becomes of them,
// stay in the second-level cache, and weights, which may not, come as often as there are blocks.
constexpr int64_t kBlockRows = 192;
// Chunks begin at multiples of this many columns: whole blocks of the layout, and whole tiles.
constexpr int64_t kChunkColumns = 4 * kInt8Columns;

struct Chunk {
  const Weights* part;
  int64_t first;         // column of the part
  int64_t first_of_all;  // column of y
  int64_t num_columns;
};

// As many of each part as there are threads.
std::vector<Chunk> chunks_of(const Weights* parts, int num_parts, int num_threads) {
  std::vector<Chunk> chunks;
  int64_t first_of_all = 0;
  for (const Weights* part = parts; part < parts + num_parts; ++part) {
    const int64_t of_thread = (part->num_columns + num_threads - 1) / num_threads;
    const int64_t width = (of_thread + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
    for (int64_t first = 0; first < part->num_columns; first += width) {
      chunks.push_back({part, first, first_of_all + first, std::min(width, part->num_columns - first)});
    }
    first_of_all += part->num_columns;
  }
  return chunks;
}

}  // namespace

void linear_int8(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
                 const Activation* activation, int num_threads) {
  require_shape(num_rows, k);
  if (k > kMaxInt8Features) {
    throw std::invalid_argument("k: expected at most " + std::to_string(kMaxInt8Features) + ", got " +
                                std::to_string(k));
  }
  const int64_t padded = int8_padded(k);
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
  const Kernels& kernel = kernels();
  const Int8Kernels& int8 = int8_kernels();
  const int threads = useful_threads(num_columns * std::max<int64_t>(k, 1) / 4, num_threads);
  const std::vector<Chunk> chunks = chunks_of(parts, num_parts, threads);
  const int64_t num_chunks = static_cast<int64_t>(chunks.size());
  const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  // A thread's share are chunks for one block of rows after the other. The rows are rounded once; by both threads,
  // where the end of a share is within a block.
  split_range(num_blocks * num_chunks, threads, [&](int64_t begin, int64_t end) {
    const int64_t most_rows = (std::min(kBlockRows, num_rows) + kInt8Rows - 1) / kInt8Rows * kInt8Rows;
    const Scratch bytes((most_rows * padded + 3) / 4);
    uint8_t* const q = reinterpret_cast<uint8_t*>(bytes.get());
    std::vector<Int8Row> of_rows(static_cast<size_t>(most_rows));
    int64_t rounded = -1;
    for (int64_t task = begin; task < end; ++task) {
      const Chunk& chunk = chunks[static_cast<size_t>(task % num_chunks)];
      const int64_t block = task / num_chunks;
      const int64_t row = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - row;
      if (block != rounded) {
        for (int64_t i = 0; i < rows; ++i) {
          of_rows[static_cast<size_t>(i)] = int8.quantize(x.data + (row + i) * x.stride, k, q + i * padded);
        }
        rounded = block;
      }
      const Weights& part = *chunk.part;
      float* const of_chunk = y.data + row * y.stride + chunk.first_of_all;
      int8.linear({rows, chunk.num_columns, padded, q, of_rows.data(), part.int8.packed + chunk.first * padded,
                   part.int8.scale + chunk.first, part.int8.sums + chunk.first,
                   part.bias == nullptr ? nullptr : part.bias + chunk.first, of_chunk, y.stride});
      if (activation == nullptr) continue;
      for (int64_t i = 0; i < rows; ++i) {
        kernel.activate(of_chunk + i * y.stride, of_chunk + i * y.stride, chunk.num_columns, *activation);
      }
    }
  });
}

}  // namespace bert_fast::cpu
