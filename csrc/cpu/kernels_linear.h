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

  // A vector of sums has this many columns of y. Of each it holds four sums, over every fourth k.
  static constexpr int kGroups = V::kLanes / 4;
  static constexpr int kRows = V::kLinearRows, kVectors = 3, kColumns = kVectors * kGroups;
  // Steps in the inner dimension between two roundings of y to memory: what a tile reads stays in the first cache
  // level.
  static constexpr int64_t kLinearSteps = 768;

  // Calls body with 0 to count - 1, each known when this is compiled: arrays that are indexed by them stay in
  // registers.
  template <int value>
  struct Index {
    static constexpr int i = value;
  };
  template <int count, class Body>
  static BERT_FAST_INLINE void each(Body body) {
    if constexpr (count > 1) each<count - 1>(body);
    if constexpr (count > 0) body(Index<count - 1>());
  }

  // Where a tile finds the weights of its columns.
  enum class From {
    kRows,       // rows of the weights, as they lie
    kRowsToLay,  // the same, and each vector is stored for the tiles of the next rows
    kPanel,      // as stored: [steps / 4, vectors, kGroups, 4]
  };

  // What the tiles of the same columns and steps share.
  struct Columns {
    const float* weight;
    int64_t weight_stride;
    int64_t num_steps;
    int num_stored;     // columns of y that are stored, of the last vector of a tile
    const float* bias;  // nullptr: none, or not yet
    bool add;           // to what y holds
    float* panel;
  };

  // Rows of weights for later tiles, fetched while this one is multiplied.
  struct Next {
    const float* weight;
    int64_t stride, num_rows;
  };

  // Four floats of each of kGroups rows; beyond `count` 0.
  static BERT_FAST_INLINE F groups(const float* rows, int64_t stride, int count) {
    if (count == 4) return V::groups(rows, stride);
    float padded[kGroups][4] = {};
    for (int i = 0; i < kGroups; ++i) {
      for (int j = 0; j < count; ++j) padded[i][j] = rows[i * stride + j];
    }
    return V::load(&padded[0][0]);
  }

  // Steps k to k + count of a tile, count <= 4.
  template <int m, int vectors, From from>
  static BERT_FAST_INLINE void linear_steps(F (&sums)[m][vectors], const float* x, int64_t x_stride, const Columns& c,
                                            int64_t k, int count) {
    F weights[vectors];
    each<vectors>([&](auto j) BERT_FAST_INLINE_LAMBDA {
      float* const of_panel = c.panel + (k * vectors + j.i * 4) * kGroups;
      weights[j.i] = from == From::kPanel
                         ? V::load(of_panel)
                         : groups(c.weight + j.i * kGroups * c.weight_stride + k, c.weight_stride, count);
      if (from == From::kRowsToLay) V::store(of_panel, weights[j.i]);
    });
    each<m>([&](auto i) BERT_FAST_INLINE_LAMBDA {
      const float* const x_row = x + i.i * x_stride + k;
      const F of_row = count == 4 ? V::every_group(x_row) : groups(x_row, 0, count);
      each<vectors>([&](auto j)
                        BERT_FAST_INLINE_LAMBDA { sums[i.i][j.i] = V::fma(of_row, weights[j.i], sums[i.i][j.i]); });
    });
  }

  // m rows of `vectors` vectors of columns.
  template <int m, int vectors, From from>
  [[gnu::noinline]] static void linear_tile(const float* x, int64_t x_stride, const Columns& columns, float* y,
                                            int64_t y_stride, const Next& next_rows) {
    const Columns c = columns;  // copies that stores through float* cannot change
    const Next next = next_rows;
    F sums[m][vectors];
    each<m>([&](auto i) BERT_FAST_INLINE_LAMBDA {
      each<vectors>([&](auto j) BERT_FAST_INLINE_LAMBDA { sums[i.i][j.i] = V::set1(0.0f); });
    });
    int64_t k = 0;
    for (; k + 4 <= c.num_steps; k += 4) {
      if (k % 16 == 0) {
        for (int64_t i = 0; i < next.num_rows; ++i) __builtin_prefetch(next.weight + i * next.stride + k, 0, 3);
      }
      linear_steps<m, vectors, from>(sums, x, x_stride, c, k, 4);
    }
    if (k < c.num_steps) {
      linear_steps<m, vectors, from>(sums, x, x_stride, c, k, static_cast<int>(c.num_steps - k));
    }
    each<(m + 3) / 4>([&](auto four) BERT_FAST_INLINE_LAMBDA {
      constexpr int kFirst = 4 * four.i, kCount = m - kFirst < 4 ? m - kFirst : 4;
      each<vectors>([&](auto j) BERT_FAST_INLINE_LAMBDA {
        F of_rows[4];
        each<4>([&](auto i) BERT_FAST_INLINE_LAMBDA {
          of_rows[i.i] = i.i < kCount ? sums[i.i < kCount ? kFirst + i.i : 0][j.i] : V::set1(0.0f);
        });
        store_totals<kCount, vectors>(of_rows, c, y + kFirst * y_stride, y_stride, j.i);
      });
    });
  }

  // `count` rows of a vector of columns.
  template <int count, int vectors>
  static BERT_FAST_INLINE void store_totals(const F* sums, const Columns& c, float* y, int64_t y_stride, int vector) {
    alignas(V::kLanes * 4) float totals[4][kGroups];
    V::store(&totals[0][0], V::group_sums(sums));
    const int64_t column = vector * kGroups;
    const float* const bias = c.bias == nullptr ? nullptr : c.bias + column;
    for (int i = 0; i < count; ++i) {
      float* const y_row = y + i * y_stride + column;
      if (vectors == kVectors || c.num_stored == kGroups) {
        store_columns<kGroups>(totals[i], bias, c.add, y_row);
      } else {
        for (int j = 0; j < c.num_stored; ++j) {
          store_columns<1>(totals[i] + j, bias == nullptr ? nullptr : bias + j, c.add, y_row + j);
        }
      }
    }
  }

  // y = totals + bias, or y + it, for `count` columns.
  template <int count>
  static BERT_FAST_INLINE void store_columns(const float* totals, const float* bias, bool add, float* y) {
    typedef float Several __attribute__((vector_size(count * sizeof(float))));
    Several sum, other;
    __builtin_memcpy(&sum, totals, sizeof(sum));
    if (bias != nullptr) {
      __builtin_memcpy(&other, bias, sizeof(other));
      sum += other;
    }
    if (add) {
      __builtin_memcpy(&other, y, sizeof(other));
      sum += other;
    }
    __builtin_memcpy(y, &sum, sizeof(sum));
  }

  // A tile of num_rows rows, at most m.
  template <int m, int vectors, From from>
  static BERT_FAST_INLINE void tile_of_rows(int64_t num_rows, const float* x, int64_t x_stride, const Columns& columns,
                                            float* y, int64_t y_stride, const Next& next) {
    if constexpr (m > 1) {
      if (num_rows < m) return tile_of_rows<m - 1, vectors, from>(num_rows, x, x_stride, columns, y, y_stride, next);
    }
    linear_tile<m, vectors, from>(x, x_stride, columns, y, y_stride, next);
  }

  // All rows of some columns. The tiles share the rows of weights to be fetched for the columns after these.
  template <int vectors>
  static void linear_columns(const LinearTiles& a, const float* x, const Columns& columns, float* y, Next next) {
    const int64_t tiles = (a.num_rows + kRows - 1) / kRows;
    const int64_t all = next.num_rows, share = (all + tiles - 1) / tiles;
    int64_t fetched = 0;
    for (int64_t row = 0; row < a.num_rows; row += kRows) {
      next.num_rows = share < all - fetched ? share : all - fetched;
      const int64_t left = a.num_rows - row;
      const float* const x_rows = x + row * a.x_stride;
      float* const y_rows = y + row * a.y_stride;
      if (vectors < kVectors || tiles == 1) {
        tile_of_rows<kRows, vectors, From::kRows>(left, x_rows, a.x_stride, columns, y_rows, a.y_stride, next);
      } else if (row == 0) {
        linear_tile<kRows, vectors, From::kRowsToLay>(x_rows, a.x_stride, columns, y_rows, a.y_stride, next);
      } else {
        tile_of_rows<kRows, vectors, From::kPanel>(left, x_rows, a.x_stride, columns, y_rows, a.y_stride, next);
      }
      next.weight += next.num_rows * next.stride;
      fetched += next.num_rows;
    }
  }

  static void linear(const LinearTiles& args) {
    const LinearTiles a = args;  // a copy that stores through float* cannot change
    alignas(64) float panel[kLinearSteps * kColumns];
    int64_t begin = 0;
    do {
      const int64_t steps = a.k - begin < kLinearSteps ? a.k - begin : kLinearSteps;
      const bool is_last = begin + steps == a.k;
      const auto columns_at = [&](int64_t column, int64_t stride, int num_stored) BERT_FAST_INLINE_LAMBDA {
        return Columns{a.weight + column * a.weight_stride + begin,
                       stride,
                       steps,
                       num_stored,
                       a.bias == nullptr || !is_last ? nullptr : a.bias + column,
                       begin > 0,
                       panel};
      };
      int64_t column = 0;
      for (; column + kColumns <= a.num_columns; column += kColumns) {
        const int64_t left = a.num_columns - column - kColumns;
        const Next next = {a.weight + (column + kColumns) * a.weight_stride + begin, a.weight_stride,
                           left < kColumns ? left : kColumns};
        linear_columns<kVectors>(a, a.x + begin, columns_at(column, a.weight_stride, kGroups), a.y + column, next);
      }
      // Columns that fill no panel: by vectors, then one by one, each as all groups of a vector.
      const Next none = {a.weight, a.weight_stride, 0};
      for (; column + kGroups <= a.num_columns; column += kGroups) {
        linear_columns<1>(a, a.x + begin, columns_at(column, a.weight_stride, kGroups), a.y + column, none);
      }
      for (; column < a.num_columns; ++column) {
        linear_columns<1>(a, a.x + begin, columns_at(column, 0, 1), a.y + column, none);
      }
      begin += steps;
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
