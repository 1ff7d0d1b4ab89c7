#include "cpu/linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/keep_bits.h"
#include "cpu/linear_bf16.h"
#include "cpu/linear_int8.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Rows of x that are multiplied by all weights of a chunk before the next ones: 768 k of them are 400 KB, half of most
// second-level caches. Weights come from farther away, once for every block.
constexpr int64_t kBlockRows = 128;
// Chunks begin at multiples of this many columns, and blocks of this many rows, which every instruction set's tile
// divides.
constexpr int64_t kChunkColumns = 12, kTileRows = 8;

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

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
    const int64_t width = rounded_up((part->num_columns + num_threads - 1) / num_threads, kChunkColumns);
    for (int64_t first = 0; first < part->num_columns; first += width) {
      chunks.push_back({part, first, first_of_all + first, std::min(width, part->num_columns - first)});
    }
    first_of_all += part->num_columns;
  }
  return chunks;
}

}  // namespace

void linear(Rows<const float> x, const Weights* parts, int num_parts, Rows<float> y, int64_t num_rows, int64_t k,
            const Activation* activation, int num_threads) {
  if (num_parts > 0 && parts->int8.packed != nullptr) {
    linear_int8(x, parts, num_parts, y, num_rows, k, activation, num_threads);
    return;
  }
  if (num_parts > 0 && is_bf16(*parts)) {
    linear_bf16(x, parts, num_parts, y, num_rows, k, activation, num_threads);
    return;
  }
  require_shape(num_rows, k);
  int64_t num_columns = 0;
  for (const Weights* part = parts; part < parts + num_parts; ++part) {
    require_shape(part->num_columns, k);
    require_address("weight", part->weight, part->num_columns * k);
    num_columns += part->num_columns;
  }
  require_address("x", x.data, num_rows * k);
  require_address("y", y.data, num_rows * num_columns);
  if (num_rows == 0 || num_columns == 0) return;
  const Kernels& kernel = kernels();
  const int threads = useful_threads(num_columns * std::max<int64_t>(k, 1), num_threads);
  const std::vector<Chunk> chunks = chunks_of(parts, num_parts, threads);
  const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  const int64_t block_rows = rounded_up((num_rows + num_blocks - 1) / num_blocks, kTileRows);
  // A thread's share are blocks of rows for one chunk of weights after the other.
  split_range(static_cast<int64_t>(chunks.size()) * num_blocks, threads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const Chunk& chunk = chunks[static_cast<size_t>(task / num_blocks)];
      const int64_t row = task % num_blocks * block_rows, rows = std::min(block_rows, num_rows - row);
      const Weights& part = *chunk.part;
      float* const of_chunk = y.data + row * y.stride + chunk.first_of_all;
      kernel.linear({rows, chunk.num_columns, k, x.data + row * x.stride, x.stride,
                     part.weight + chunk.first * part.stride, part.stride,
                     part.bias == nullptr ? nullptr : part.bias + chunk.first, of_chunk, y.stride});
      if (activation == nullptr) continue;
      for (int64_t i = 0; i < rows; ++i) {
        kernel.activate(of_chunk + i * y.stride, of_chunk + i * y.stride, chunk.num_columns, *activation);
      }
    }
  });
}

void activate(float* dst, const float* src, int64_t count, Activation activation, int num_threads) {
  require_shape(1, count);
  require_address("src", src, count);
  require_address("dst", dst, count);
  const Kernels& kernel = kernels();
  // Shares are whole vectors of every instruction set, so that no thread's end splits one.
  split_range((count + 15) / 16, useful_threads(count, num_threads), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * 16, last = std::min(end * 16, count);
    kernel.activate(dst + first, src + first, last - first, activation);
  });
}

Activation activation_of(const char* name) {
  if (std::strcmp(name, "gelu") == 0) return Activation::kGelu;
  if (std::strcmp(name, "gelu_new") == 0 || std::strcmp(name, "gelu_pytorch_tanh") == 0) return Activation::kGeluTanh;
  if (std::strcmp(name, "relu") == 0) return Activation::kRelu;
  if (std::strcmp(name, "silu") == 0 || std::strcmp(name, "swish") == 0) return Activation::kSilu;
  throw std::invalid_argument(std::string("hidden_act: expected gelu, gelu_new, gelu_pytorch_tanh, relu, silu or "
                                          "swish; got ") +
                              name);
}

}  // namespace bert_fast::cpu
