#include "cpu/linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/keep_bits.h"
#include "cpu/linear_bf16.h"
#include "cpu/linear_blocks.h"
#include "cpu/linear_int8.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Rows of x that are multiplied by all weights of a chunk before the next ones: 768 k of them are 400 KB, half of most
// second-level caches. Weights come from farther away, once for every block.
constexpr int64_t kBlockRows = 128;
// Chunks begin at multiples of this many columns, which every instruction set's tile divides.
constexpr int64_t kChunkColumns = 12;

struct Worker {
  Rows<const float> x;
  int64_t k, y_stride;
  const float* first = nullptr;

  void round(int64_t row, int64_t) { first = x.data + row * x.stride; }

  void multiply(const Chunk& chunk, int64_t rows, float* y) const {
    const Weights& part = *chunk.part;
    kernels().linear({rows, chunk.num_columns, k, first, x.stride, part.weight + chunk.first * part.stride, part.stride,
                      part.bias == nullptr ? nullptr : part.bias + chunk.first, y, y_stride});
  }
};

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
  const int threads = useful_threads(num_columns * std::max<int64_t>(k, 1), num_threads);
  multiply_in_blocks(chunks_of(parts, num_parts, threads, kChunkColumns), y, num_rows, kBlockRows, activation, threads,
                     [&](int64_t) { return Worker{x, k, y.stride}; });
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
