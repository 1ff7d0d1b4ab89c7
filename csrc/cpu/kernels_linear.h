// Linear layers and activations for an instruction set V, and the table of all its kernels. To be included as
// kernels_body.h is, which says what V has.

#ifndef BERT_FAST_CPU_KERNELS_LINEAR_H_
#define BERT_FAST_CPU_KERNELS_LINEAR_H_

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/kernels_body.h"

namespace bert_fast::cpu {

template <class V>
struct LinearKernels {
  using F = typename V::F;
  using Rows = RowKernels<V>;

  // Steps in the inner dimension of a linear layer between two roundings of y to memory: rows of the tile of weights
  // then stay in the first-level cache.
  static constexpr int64_t kLinearSteps = 768;

  // An m x n tile of y, every element of it a vector of sums over every kLanes-th k: x and weights are read along their
  // rows, so neither is laid out anew. `next` is a row of weights that a later tile reads, and is asked for now.
  template <int m, int n>
  static BERT_FAST_INLINE void linear_tile(const LinearTiles& a, int64_t row, int64_t column, int64_t begin,
                                           int64_t end, const float* next) {
    const float* x = a.x + row * a.x_stride;
    const float* weight = a.weight + column * a.weight_stride;
    // In the order in which totals are stored: four columns of every row, then the others of every row.
    constexpr int kFirst = n < 4 ? n : 4, kOthers = n - kFirst;
    F first[m][kFirst], others[m][kOthers + 1];
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < kFirst; ++j) first[i][j] = V::set1(0.0f);
      for (int j = 0; j < kOthers; ++j) others[i][j] = V::set1(0.0f);
    }
    Rows::for_columns(end - begin, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const int64_t k = begin + c;
      F weights[n];
      for (int j = 0; j < n; ++j) weights[j] = at.load(weight + j * a.weight_stride + k);
      __builtin_prefetch(next + k, 0, 2);
      for (int i = 0; i < m; ++i) {
        const F x_vector = at.load(x + i * a.x_stride + k);
        for (int j = 0; j < kFirst; ++j) first[i][j] = V::fma(x_vector, weights[j], first[i][j]);
        for (int j = 0; j < kOthers; ++j) others[i][j] = V::fma(x_vector, weights[kFirst + j], others[i][j]);
      }
    });
    float* y = a.y + row * a.y_stride + column;
    const float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const bool has_bias = a.bias != nullptr && end == a.k;
    store_totals<m, kFirst>(&first[0][0], kFirst, has_bias ? a.bias + column : none, begin > 0, y, a.y_stride);
    if (kOthers > 0) {
      store_totals<m, kOthers>(&others[0][0], kOthers + 1, has_bias ? a.bias + column + kFirst : none, begin > 0,
                               y + kFirst, a.y_stride);
    }
  }

  // y [m, n] = the sums of m x n vectors + bias, or y + it.
  template <int m, int n>
  static BERT_FAST_INLINE void store_totals(const F* sums, int stride, const float* bias, bool add, float* y,
                                            int64_t y_stride) {
    constexpr int kGroups = (m * n + V::kLanes - 1) / V::kLanes, kOfGroup = m * n < V::kLanes ? m * n : V::kLanes;
    float totals[kGroups * V::kLanes];
    for (int group = 0; group < kGroups; ++group) {
      F of_group[V::kLanes];
      for (int i = 0; i < V::kLanes; ++i) {
        const int place = group * V::kLanes + i;
        of_group[i] = place < m * n ? sums[place / n * stride + place % n] : V::set1(0.0f);
      }
      V::store(totals + group * V::kLanes, V::template sums<kOfGroup>(of_group));
    }
    if (add) {
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) y[i * y_stride + j] += totals[i * n + j] + bias[j];
      }
    } else {
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) y[i * y_stride + j] = totals[i * n + j] + bias[j];
      }
    }
  }

  // All rows of n columns. The first tiles ask for a row each of the weights of the next n columns.
  template <int n>
  static void linear_columns(const LinearTiles& a, int64_t column, int64_t begin, int64_t end) {
    constexpr int m = V::kLinearRows;
    const int64_t num_next = a.num_columns - column - n < n ? a.num_columns - column - n : n;
    const float* const weight = a.weight + column * a.weight_stride;
    const float* const next = weight + n * a.weight_stride;
    int64_t row = 0, asked = 0;
    for (; row + m <= a.num_rows; row += m, ++asked) {
      linear_tile<m, n>(a, row, column, begin, end, asked < num_next ? next + asked * a.weight_stride : weight);
    }
    for (; row < a.num_rows; ++row, ++asked) {
      linear_tile<1, n>(a, row, column, begin, end, asked < num_next ? next + asked * a.weight_stride : weight);
    }
  }

  static void linear(const LinearTiles& args) {
    const LinearTiles a = args;  // a copy that stores through float* cannot change
    constexpr int n = V::kLinearColumns;
    int64_t begin = 0;
    do {
      const int64_t end = a.k - begin < kLinearSteps ? a.k : begin + kLinearSteps;
      int64_t column = 0;
      for (; column + n <= a.num_columns; column += n) linear_columns<n>(a, column, begin, end);
      for (; column < a.num_columns; ++column) linear_columns<1>(a, column, begin, end);
      begin = end;
    } while (begin < a.k);
  }

  // Phi(x), the normal distribution function, within 4 units in the last place: Phi(-a) = Rows::exp(-a^2 / 2) t p(t)
  // with t = 1 / (1 + 0.35 a), the form of Hastings (1955); tools/fit_normal_tail.py derives p.
  static BERT_FAST_INLINE F normal_cdf(F x) {
    const F zero = V::set1(0.0f), one = V::set1(1.0f);
    const F size = V::max(x, zero - x);
    const F t = V::reciprocal(V::fma(V::min(V::set1(1e4f), size), V::set1(0.35f), one));
    F p = V::fma(t, V::set1(-2.911501685e-02f), V::set1(1.438184228e-01f));
    p = V::fma(p, t, V::set1(-2.553910245e-01f));
    p = V::fma(p, t, V::set1(1.587965768e-01f));
    p = V::fma(p, t, V::set1(-2.284343460e-02f));
    p = V::fma(p, t, V::set1(1.053921501e-01f));
    p = V::fma(p, t, V::set1(1.198630880e-01f));
    p = V::fma(p, t, V::set1(1.398575621e-01f));
    p = V::fma(p, t, V::set1(1.396216603e-01f));
    const F tail = Rows::exp(size * size * V::set1(-0.5f)) * t * p;
    // The second of one - tail and tail where x < 0.
    const F upper = V::zero_where_less(one, x, zero);
    return V::fma(upper, one - tail - tail, tail);
  }

  // 1 / (1 + e^-x); 0 below -88, where it leaves the normal numbers.
  static BERT_FAST_INLINE F logistic(F x) {
    const F one = V::set1(1.0f);
    return V::zero_where_less(V::reciprocal(one + Rows::exp(V::set1(0.0f) - x)), x, V::set1(-88.0f));
  }

  template <class Function>
  static BERT_FAST_INLINE void map(float* dst, const float* src, int64_t num_columns, Function function) {
    Rows::for_columns(num_columns, [&](int64_t c, auto at)
                                       BERT_FAST_INLINE_LAMBDA { at.store(dst + c, function(at.load(src + c))); });
  }

  static void activate(float* dst, const float* src, int64_t num_columns, Activation activation) {
    const F zero = V::set1(0.0f);
    switch (activation) {
      case Activation::kGelu:
        map(dst, src, num_columns, [](F x) BERT_FAST_INLINE_LAMBDA { return x * normal_cdf(x); });
        return;
      case Activation::kGeluTanh:  // x (1 + tanh(z)) / 2 = x logistic(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        map(dst, src, num_columns, [](F x) BERT_FAST_INLINE_LAMBDA {
          const F z = x * V::fma(x * x, V::set1(0.07135481627f), V::set1(1.59576912161f));
          return x * logistic(z);
        });
        return;
      case Activation::kRelu:  // NaN stays
        map(dst, src, num_columns, [&](F x) BERT_FAST_INLINE_LAMBDA { return V::max(zero, x); });
        return;
      case Activation::kSilu:
        map(dst, src, num_columns, [](F x) BERT_FAST_INLINE_LAMBDA { return x * logistic(x); });
        return;
    }
  }
};

template <class V>
constexpr Kernels kernels_of() {
  using Rows = RowKernels<V>;
  using Linear = LinearKernels<V>;
  return {Rows::keep_bits,       Rows::apply_keep_bits,  Rows::layer_norm_forward, Rows::layer_norm_backward,
          Rows::softmax_forward, Rows::softmax_backward, Linear::linear,           Linear::activate,
          Rows::turn_heads,      Rows::matmul,           Rows::transpose};
}

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_KERNELS_LINEAR_H_
