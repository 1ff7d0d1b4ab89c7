// The one body of bf16 kernels that read both operands along their rows, a template over an instruction set V; to be
// included as kernels_body.h is, by bf16_<name>.cpp.
//
// V has:
//   F, kLanes                        a vector of floats
//   load_first(p, n)                 the first n <= kLanes floats, others 0
//   load(p)
//   store_rounded(p, x)              kLanes floats in bf16, to nearest, ties to even; NaN stays NaN
//   Words, load_words(p)             2 * kLanes values in bf16
//   Operand, operand<i>(words)       what `dot` takes, kDots of each Words
//   zero, dot(sum, a, b), reduce_add
//   kRows, kColumns                  the tile of a product

#ifndef BERT_FAST_CPU_BF16_BODY_H_
#define BERT_FAST_CPU_BF16_BODY_H_

#include <cstddef>
#include <cstdint>

#include "cpu/bf16.h"

#define BERT_FAST_INLINE inline __attribute__((always_inline))

namespace bert_fast::cpu {

template <class V>
struct Bf16Body {
  using F = typename V::F;

  static void round(const float* x, int64_t k, Bf16* rounded) {
    int64_t c = 0;
    for (; c + V::kLanes <= k; c += V::kLanes) V::store_rounded(rounded + c, V::load(x + c));
    const int64_t padded = bf16_padded(k);
    if (c < k) {
      V::store_rounded(rounded + c, V::load_first(x + c, static_cast<int>(k - c)));
      c += V::kLanes;
    }
    __builtin_memset(rounded + c, 0, static_cast<size_t>(padded - c) * sizeof(Bf16));
  }

  static void pack(const float* x, int64_t x_stride, int64_t num_rows, int64_t k, Bf16* packed) {
    const int64_t padded = bf16_padded(k);
    for (int64_t row = 0; row < num_rows; ++row) round(x + row * x_stride, k, packed + row * padded);
  }

  // The sums of a tile's elements to which operand number i of every Words adds.
  template <int i, int m, int n>
  static BERT_FAST_INLINE void add_products(F (&sums)[m][n], const Bf16* x, int64_t x_stride, const Bf16* weight,
                                            int64_t weight_stride) {
    typename V::Operand of_rows[m];
    for (int row = 0; row < m; ++row) of_rows[row] = V::template operand<i>(V::load_words(x + row * x_stride));
    for (int column = 0; column < n; ++column) {
      const typename V::Operand of_column = V::template operand<i>(V::load_words(weight + column * weight_stride));
      for (int row = 0; row < m; ++row) sums[row][column] = V::dot(sums[row][column], of_rows[row], of_column);
    }
    if constexpr (i + 1 < V::kDots) add_products<i + 1>(sums, x, x_stride, weight, weight_stride);
  }

  template <int m, int n>
  static BERT_FAST_INLINE void tile(const Bf16Tiles& a, int64_t row, int64_t column) {
    const Bf16* const x = a.x + row * a.k;
    const Bf16* const weight = a.weight + column * a.weight_stride;
    F sums[m][n];
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) sums[i][j] = V::zero();
    }
    for (int64_t k = 0; k < a.k; k += 2 * V::kLanes) {
      add_products<0>(sums, x + k, a.k, weight + k, a.weight_stride);
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        const float bias = a.bias == nullptr ? 0.0f : a.bias[column + j];
        a.y[(row + i) * a.y_stride + column + j] = V::reduce_add(sums[i][j]) + bias;
      }
    }
  }

  template <int m, int n>
  static void tile_of(const Bf16Tiles& a, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    if constexpr (m > 1) {
      if (rows < m) return tile_of<m - 1, n>(a, row, column, rows, columns);
    }
    if constexpr (n > 1) {
      if (columns < n) return tile_of<m, n - 1>(a, row, column, rows, columns);
    }
    tile<m, n>(a, row, column);
  }

  static void linear(const Bf16Tiles& args) {
    const Bf16Tiles a = args;  // a copy that stores through float* cannot change
    for (int64_t column = 0; column < a.num_columns; column += V::kColumns) {
      for (int64_t row = 0; row < a.num_rows; row += V::kRows) {
        tile_of<V::kRows, V::kColumns>(a, row, column, a.num_rows - row, a.num_columns - column);
      }
    }
  }
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_BF16_BODY_H_
