// How products share work: for one block of rows after the other, which stay in the second-level cache, one chunk of
// columns after the other.

#ifndef BERT_FAST_CPU_LINEAR_BLOCKS_H_
#define BERT_FAST_CPU_LINEAR_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/linear.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {

struct Chunk {
  const Weights* part;
  int64_t first;         // column of the part
  int64_t first_of_all;  // column of y
  int64_t num_columns;
};

// As many of each part as there are threads; they begin at multiples of `unit` columns.
inline std::vector<Chunk> chunks_of(const Weights* parts, int num_parts, int num_threads, int64_t unit) {
  std::vector<Chunk> chunks;
  int64_t first_of_all = 0;
  for (const Weights* part = parts; part < parts + num_parts; ++part) {
    const int64_t of_thread = (part->num_columns + num_threads - 1) / num_threads;
    const int64_t width = (of_thread + unit - 1) / unit * unit;
    for (int64_t first = 0; first < part->num_columns; first += width) {
      chunks.push_back({part, first, first_of_all + first, std::min(width, part->num_columns - first)});
    }
    first_of_all += part->num_columns;
  }
  return chunks;
}

// Tiles have this many rows at most.
constexpr int64_t kBlockUnit = 16;

// Each thread makes a worker by make_worker(most rows of a block) and calls its round(first_row, num_rows) once for a
// block, then its multiply(chunk, num_rows, y of the block and chunk) for its share of the chunks; the rows are rounded
// by both threads, where the end of a share is within a block. block_rows: a multiple of kBlockUnit.
template <class MakeWorker>
void multiply_in_blocks(const std::vector<Chunk>& chunks, Rows<float> y, int64_t num_rows, int64_t block_rows,
                        const Activation* activation, int num_threads, const MakeWorker& make_worker) {
  const Kernels& kernel = kernels();
  const int64_t num_chunks = static_cast<int64_t>(chunks.size());
  const int64_t most_blocks = (num_rows + block_rows - 1) / block_rows;
  const int64_t units = (num_rows + most_blocks * kBlockUnit - 1) / (most_blocks * kBlockUnit);
  const int64_t of_block = units * kBlockUnit, num_blocks = (num_rows + of_block - 1) / of_block;
  split_range(num_blocks * num_chunks, num_threads, [&](int64_t begin, int64_t end) {
    auto worker = make_worker(std::min(of_block, num_rows));
    int64_t rounded = -1;
    for (int64_t task = begin; task < end; ++task) {
      const Chunk& chunk = chunks[static_cast<size_t>(task % num_chunks)];
      const int64_t block = task / num_chunks;
      const int64_t row = block * of_block, rows = std::min(of_block, num_rows - row);
      if (block != rounded) {
        worker.round(row, rows);
        rounded = block;
      }
      float* const of_chunk = y.data + row * y.stride + chunk.first_of_all;
      worker.multiply(chunk, rows, of_chunk);
      if (activation == nullptr) continue;
      for (int64_t i = 0; i < rows; ++i) {
        kernel.activate(of_chunk + i * y.stride, of_chunk + i * y.stride, chunk.num_columns, *activation);
      }
    }
  });
}

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_LINEAR_BLOCKS_H_
