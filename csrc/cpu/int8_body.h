// The one body of int8 kernels, a template over an instruction set V; to be included as kernels_body.h is, by
// int8_<name>.cpp.
//
// V has:
//   F, I, kLanes                          vectors of floats and of int32
//   load, store, load_first, store_first  of floats; the latter touch n lanes only, other lanes load as 0
//   load_ints, load_ints_first            of int32
//   load_bytes(p)                         4 * kLanes bytes
//   set1, set1_int, add, multiply, min, max (of floats), reduce_min, reduce_max, reduce_add
//   subtract_product(a, b, c)             a - b * c of int32
//   to_float                              rounds to nearest, ties to even, as all below
//   store_quantized(p, x, inverse, zero)  kLanes bytes: x * inverse rounded, plus zero, between 0 and 255
//   kRows, kBlocks                        the tile of a product: rows, and blocks of kInt8Columns columns
//   Bytes, spread(p)                      4 bytes of a row, for every lane
//   dot(acc, bytes, weights)              acc += sum over 4 of unsigned bytes times signed weights, exact

#ifndef BERT_FAST_CPU_INT8_BODY_H_
#define BERT_FAST_CPU_INT8_BODY_H_

#include <cstddef>
#include <cstdint>

#include "cpu/int8.h"

#define BERT_FAST_INLINE inline __attribute__((always_inline))

namespace bert_fast::cpu {

template <class V>
struct Int8Body {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int kVectors = kInt8Columns / V::kLanes;  // of a block's columns

  static Int8Row quantize(const float* x, int64_t k, uint8_t* q) {
    constexpr float kStep = 1.0f / 255.0f, kLeast = 1.17549435e-38f;  // the least that 1 / scale is finite of
    F low = V::set1(0.0f), high = low, unfit = low;
    const int rest = static_cast<int>(k % V::kLanes);
    const int64_t whole = k - rest;
    const auto look = [&](F values) __attribute__((always_inline)) {
      low = V::min(low, values);
      high = V::max(high, values);
      unfit = V::add(unfit, V::multiply(values, V::set1(0.0f)));  // NaN once a value is not finite
    };
    for (int64_t c = 0; c < whole; c += V::kLanes) look(V::load(x + c));
    if (rest > 0) look(V::load_first(x + whole, rest));
    const float least = V::reduce_min(low), greatest = V::reduce_max(high), nan = V::reduce_add(unfit);
    const float scale = greatest * kStep - least * kStep;
    const int64_t padded = int8_padded(k);
    if (nan != nan || !(scale >= kLeast)) {  // nothing to quantize, or zeros
      __builtin_memset(q, 0, static_cast<size_t>(padded));
      return {nan, 0};
    }
    const float inverse = 1.0f / scale;
    int32_t zero = static_cast<int32_t>(__builtin_rintf(-least * inverse));
    zero = zero > 255 ? 255 : zero;
    for (int64_t c = 0; c < whole; c += V::kLanes) V::store_quantized(q + c, V::load(x + c), inverse, zero);
    if (rest > 0) V::store_quantized(q + whole, V::load_first(x + whole, rest), inverse, zero);
    __builtin_memset(q + k, 0, static_cast<size_t>(padded - k));
    return {scale, zero};
  }

  // Stores sums of one row and the vector of columns from `column` on.
  static BERT_FAST_INLINE void finish(const Int8Tiles& a, int64_t row, int64_t column, I sums) {
    const Int8Row& of_row = a.rows[row];
    float* const y = a.y + row * a.y_stride + column;
    if (column + V::kLanes <= a.num_columns) {
      const I of_zero = V::load_ints(a.sums + column);
      const F scale = V::multiply(V::set1(of_row.scale), V::load(a.scale + column));
      F made = V::multiply(V::to_float(V::subtract_product(sums, V::set1_int(of_row.zero), of_zero)), scale);
      if (a.bias != nullptr) made = V::add(made, V::load(a.bias + column));
      V::store(y, made);
    } else if (column < a.num_columns) {
      const int n = static_cast<int>(a.num_columns - column);
      const I of_zero = V::load_ints_first(a.sums + column, n);
      const F scale = V::multiply(V::set1(of_row.scale), V::load_first(a.scale + column, n));
      F made = V::multiply(V::to_float(V::subtract_product(sums, V::set1_int(of_row.zero), of_zero)), scale);
      if (a.bias != nullptr) made = V::add(made, V::load_first(a.bias + column, n));
      V::store_first(y, made, n);
    }
  }

  // m rows of n blocks.
  template <int m, int n>
  static BERT_FAST_INLINE void tile(const Int8Tiles& a, int64_t row, int64_t column) {
    const uint8_t* const q = a.q + row * a.k;
    const int8_t* const packed = a.packed + column * a.k;
    I acc[m][n][kVectors];
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        for (int v = 0; v < kVectors; ++v) acc[i][j][v] = V::set1_int(0);
      }
    }
    for (int64_t k = 0; k < a.k; k += kInt8Depth) {
      I weights[n][kVectors];
      for (int j = 0; j < n; ++j) {
        for (int v = 0; v < kVectors; ++v) {
          weights[j][v] = V::load_bytes(packed + kInt8Columns * (j * a.k + k) + v * V::kLanes * kInt8Depth);
        }
      }
      for (int i = 0; i < m; ++i) {
        const typename V::Bytes bytes = V::spread(q + i * a.k + k);
        for (int j = 0; j < n; ++j) {
          for (int v = 0; v < kVectors; ++v) acc[i][j][v] = V::dot(acc[i][j][v], bytes, weights[j][v]);
        }
      }
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        for (int v = 0; v < kVectors; ++v) {
          finish(a, row + i, column + j * kInt8Columns + v * V::kLanes, acc[i][j][v]);
        }
      }
    }
  }

  // All rows of n blocks, as many at a time as fill tiles evenly.
  template <int n>
  static void blocks(const Int8Tiles& a, int64_t column) {
    const int64_t groups = (a.num_rows + V::kRows - 1) / V::kRows;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = a.num_rows * group / groups, end = a.num_rows * (group + 1) / groups;
      rows_of_tile<V::kRows, n>(a, row, end - row, column);
    }
  }

  template <int m, int n>
  static BERT_FAST_INLINE void rows_of_tile(const Int8Tiles& a, int64_t row, int64_t count, int64_t column) {
    if constexpr (m > 1) {
      if (count < m) return rows_of_tile<m - 1, n>(a, row, count, column);
    }
    tile<m, n>(a, row, column);
  }

  static void linear(const Int8Tiles& args) {
    const Int8Tiles a = args;  // a copy that stores through float* cannot change
    int64_t column = 0;
    for (; a.num_columns - column > (V::kBlocks - 1) * kInt8Columns; column += V::kBlocks * kInt8Columns) {
      blocks<V::kBlocks>(a, column);
    }
    for (; column < a.num_columns; column += kInt8Columns) blocks<1>(a, column);
  }
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_INT8_BODY_H_
