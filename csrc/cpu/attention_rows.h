// How rows of attention's matrices lie, so that products take whole vectors and meet no evicted cache lines.

#ifndef BERT_FAST_CPU_ATTENTION_ROWS_H_
#define BERT_FAST_CPU_ATTENTION_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

inline int64_t padded(int64_t num_columns) {
  return (num_columns + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns;
}

// Floats from one row of `width` scores to the next. A product reads a cache line or a few of each of head_dim rows;
// 512 bytes apart or a multiple of it, these lines share so few sets of the first-level cache that they evict each
// other.
inline int64_t row_stride(int64_t width) { return width % 128 == 0 ? width + 16 : width; }

// dst [num_rows, padded(n)] dense, zeros beyond n. Rows of packed tensors lie a power of two apart and would evict each
// other.
inline void gather_rows(float* dst, const float* src, int64_t src_stride, int64_t num_rows, int64_t n) {
  const int64_t width = padded(n);
  for (int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(dst + i * width, src + i * src_stride, static_cast<size_t>(n) * sizeof(float));
  }
  if (width == n) return;
  for (int64_t i = 0; i < num_rows; ++i) std::fill(dst + i * width + n, dst + (i + 1) * width, 0.0f);
}

// dst [padded(n), dst_stride]: the transpose of num_rows rows, by way of `rows` where they do not fill whole vectors.
inline void transpose_rows(const Kernels& kernel, float* dst, int64_t dst_stride, const float* src, int64_t src_stride,
                           int64_t num_rows, int64_t n, float* rows) {
  const int64_t width = padded(n);
  if (width != n) gather_rows(rows, src, src_stride, num_rows, n);
  kernel.transpose(dst, dst_stride, width == n ? src : rows, width == n ? src_stride : width, num_rows, width);
}

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_ROWS_H_
