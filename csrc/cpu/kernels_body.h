// The one body of every row kernel, a template over an instruction set V. Include it only from kernels_<name>.cpp, with
// V in an unnamed namespace: every instantiation then stays inside its file, and no function compiled for a newer
// processor can be linked in place of another file's. For the same reason nothing here uses the standard library's
// templates.
//
// V has:
//   F, kLanes                             a vector of floats, with + - * and, on comparison, a mask that selects
//   load, store, load_first, store_first  the latter touch n lanes only; other lanes load as 0
//   select_first(x, other, n)             x in the first n lanes, other in the rest
//   set1, fma (a * b + c), fnma (c - a * b), reduce_add, reduce_max
//   min, max                              the second argument where one is NaN
//   zero_where_less(x, a, b)              x, but 0 where a < b
//   keep(x, bits, column)                 x where the keep bit is 1, else 0; column % kLanes == 0
//   kTileVectors                          vectors per row of a matrix product's tile
//   kLinearRows                           rows of the tile of a linear layer, which has 3 vectors of each
//   groups(rows, stride)                  four floats of each of kLanes / 4 rows; every_group(p): the same four
//   group_sums(v)                         element i * (kLanes / 4) + j is the sum of group j of v[i], i < 4
//   reciprocal                            1 / x for 1 <= x, within two units in the last place
//   interleave_low, interleave_high       a0 b0 a1 b1 .. from the first, second halves of a and b
//   power_of_two(magic)                   2^n from n + 1.5 * 2^23
//   Words, kBlocks                        kBlocks Philox words, each in the low half of 64 bits, high half arbitrary
//   words, block_words, multiply, high, mix, store_keep_bits

#ifndef BERT_FAST_CPU_KERNELS_BODY_H_
#define BERT_FAST_CPU_KERNELS_BODY_H_

#include <math.h>

#include <cstdint>

#include "cpu/kernels.h"

#define BERT_FAST_INLINE inline __attribute__((always_inline))
#define BERT_FAST_INLINE_LAMBDA __attribute__((always_inline))

namespace bert_fast::cpu {

template <class V>
struct RowKernels {
  using F = typename V::F;
  using Words = typename V::Words;

  // How a row is read: whole vectors, then one vector of the n columns that are left.
  struct Whole {
    F load(const float* p) const { return V::load(p); }
    void store(float* p, F x) const { V::store(p, x); }
    F valid_or(F x, F) const { return x; }
  };
  struct Rest {
    int n;
    F load(const float* p) const { return V::load_first(p, n); }
    void store(float* p, F x) const { V::store_first(p, x, n); }
    F valid_or(F x, F other) const { return V::select_first(x, other, n); }
  };

  template <class Body>
  static BERT_FAST_INLINE void for_columns(int64_t num_columns, Body body) {
    int64_t column = 0;
    for (; column + V::kLanes <= num_columns; column += V::kLanes) body(column, Whole{});
    if (column < num_columns) body(column, Rest{static_cast<int>(num_columns - column)});
  }

  // The factor is what is dropped, so that NaN and inf, times 0, stay NaN as in PyTorch.
  static BERT_FAST_INLINE F keep_and_scale(F x, const uint8_t* bits, int64_t column, F scale) {
    return bits == nullptr ? x : x * V::keep(scale, bits, column);
  }

  // e^x within 1.1 units in the last place for -87.33 <= x <= 88.37; 0 below (no subnormals), e^88.37 above, NaN for
  // NaN. x = n ln 2 + r, |r| <= ln(2) / 2; e^r = 1 + r + r^2 q(r) with q of degree 4 fitted for least relative error
  // of the whole (3.1e-9, far below rounding).
  static BERT_FAST_INLINE F exp(F x) {
    const F magic = V::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
    const F clamped = V::min(V::set1(88.37f), x);
    const F shifted = V::fma(clamped, V::set1(1.44269504f), magic);
    const F n = shifted - magic;
    F r = V::fma(n, V::set1(-0.693359375f), clamped);  // ln 2 in two parts; the first has 9 bits, so n * it is exact
    r = V::fma(n, V::set1(2.12194440e-4f), r);
    F q = V::fma(r, V::set1(0.00138145406f), V::set1(0.00836874545f));
    q = V::fma(q, r, V::set1(0.041668389f));
    q = V::fma(q, r, V::set1(0.166665211f));
    q = V::fma(q, r, V::set1(0.49999994f));
    const F tail = V::fma(r * r, q, r);
    const F power = V::power_of_two(shifted);
    return V::zero_where_less(V::fma(power, tail, power), x, V::set1(-87.33f));
  }

  static void keep_bits(const DropoutSpec& spec, uint32_t row, uint32_t position, uint32_t first_block,
                        int64_t num_blocks, uint8_t* bits) {
    if (spec.threshold == 0 || spec.threshold > 65535) {
      for (int64_t block = 0; block < num_blocks; ++block) bits[block] = spec.threshold == 0 ? 0xFF : 0;
      return;
    }
    const Words position_words = V::words(position), row_words = V::words(row), site_words = V::words(spec.site);
    for (int64_t block = 0; block < num_blocks; block += V::kBlocks) {
      Words c0 = V::block_words(first_block + static_cast<uint32_t>(block));
      Words c1 = position_words, c2 = row_words, c3 = site_words;
      uint32_t k0 = static_cast<uint32_t>(spec.seed), k1 = static_cast<uint32_t>(spec.seed >> 32);
      for (int round = 0; round < 7; ++round) {
        const Words product0 = V::multiply(c0, 0xD2511F53u), product1 = V::multiply(c2, 0xCD9E8D57u);
        c0 = V::mix(V::high(product1), c1, V::words(k0));
        c2 = V::mix(V::high(product0), c3, V::words(k1));
        c1 = product1;  // the low word; the high half is ignored by every reader
        c3 = product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      V::store_keep_bits(c0, c1, c2, c3, spec.threshold, bits + block);
    }
  }

  static void apply_keep_bits(float* dst, const float* src, const uint8_t* bits, float scale, int64_t num_columns) {
    const F scale_f = V::set1(scale);
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      at.store(dst + c, keep_and_scale(at.load(src + c), bits, c, scale_f));
    });
  }

  static void turn_heads(const TurnedHeads& heads, int64_t num_freqs) {
    const TurnedHeads h = heads;  // a copy that stores through float* cannot change
    const F sign = V::set1(h.sign);
    // A few columns of all heads after another, so that cos and sin stay in registers.
    for_columns(num_freqs, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F cos = at.load(h.cos + c), sin = at.load(h.sin + c) * sign;
      for (int64_t head = 0; head < h.num_heads; ++head) {
        const float* x = h.x + head * h.x_stride + c;
        float* y = h.y + head * h.y_stride + c;
        const F x1 = at.load(x), x2 = at.load(x + num_freqs);
        at.store(y, V::fnma(x2, sin, x1 * cos));
        at.store(y + num_freqs, V::fma(x1, sin, x2 * cos));
      }
    });
  }

  static LayerNormStatistics layer_norm_forward(const LayerNormForwardRow& row, int64_t num_columns) {
    const LayerNormForwardRow r = row;  // a copy that stores through float* cannot change
    const F scale = V::set1(r.scale);
    F sum = V::set1(0.0f);
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      F x = at.load(r.x + c);
      if (r.x_bias != nullptr) x = x + at.load(r.x_bias + c);
      const F h = at.load(r.residual + c) + keep_and_scale(x, r.keep_bits, c, scale);
      at.store(r.h + c, h);
      sum = sum + h;
    });
    const float count = static_cast<float>(num_columns);
    const float first_mean = V::reduce_add(sum) / count;

    // Corrected two-pass variance (Chan, Golub and LeVeque 1983): the row is in cache by now, so a second
    // pass costs less than the digits that E[h^2] - E[h]^2 loses, and the sum of the centred values, 0 if the first
    // mean were exact, takes the rounding of the first sum out of both statistics.
    const F first_mean_f = V::set1(first_mean), zero = V::set1(0.0f);
    F squares = zero, excess = zero;
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F centred = at.valid_or(at.load(r.h + c) - first_mean_f, zero);
      squares = V::fma(centred, centred, squares);
      excess = excess + centred;
    });
    const float correction = V::reduce_add(excess) / count;
    const float variance = V::reduce_add(squares) / count - correction * correction;
    LayerNormStatistics statistics;
    statistics.mean = first_mean + correction;
    // NaN where the variance is NaN or infinite: 1 / sqrt(inf) = 0 would hide the overflow behind a row of biases.
    statistics.rstd = variance < INFINITY ? 1.0f / sqrtf((variance > 0.0f ? variance : 0.0f) + r.eps) : NAN;

    const F mean = V::set1(statistics.mean), rstd = V::set1(statistics.rstd);
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F normalized = (at.load(r.h + c) - mean) * rstd;
      at.store(r.y + c, V::fma(normalized, at.load(r.weight + c), at.load(r.bias + c)));
    });
    return statistics;
  }

  // Where the normalised row comes from: see LayerNormBackwardRow.
  struct FromInput {
    const float* h;
    F mean, rstd;
    template <class At>
    BERT_FAST_INLINE F operator()(int64_t c, At at) const {
      return (at.load(h + c) - mean) * rstd;
    }
  };
  struct FromOutput {
    const float *y, *bias, *inverse;
    template <class At>
    BERT_FAST_INLINE F operator()(int64_t c, At at) const {
      return (at.load(y + c) - at.load(bias + c)) * at.load(inverse + c);
    }
  };

  static void layer_norm_backward(const LayerNormBackwardRow& row, int64_t num_columns) {
    const LayerNormBackwardRow r = row;  // a copy that stores through float* cannot change
    if (r.inverse != nullptr) {
      layer_norm_backward_from(FromOutput{r.kept, r.bias, r.inverse}, r, num_columns);
    } else {
      const F mean = V::set1(r.statistics.mean), rstd = V::set1(r.statistics.rstd);
      layer_norm_backward_from(FromInput{r.kept, mean, rstd}, r, num_columns);
    }
  }

  // With n the normalised row and g = dy * weight: dresidual = rstd * (g - mean(g) - n * mean(g * n)).
  template <class Normalized>
  static BERT_FAST_INLINE void layer_norm_backward_from(const Normalized normalized, const LayerNormBackwardRow& r,
                                                        int64_t num_columns) {
    const F rstd = V::set1(r.statistics.rstd), scale = V::set1(r.scale);
    F sum_g = V::set1(0.0f), sum_gn = V::set1(0.0f);
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F dy = at.load(r.dy + c), n = normalized(c, at);
      const F g = dy * at.load(r.weight + c);
      sum_g = sum_g + g;
      sum_gn = V::fma(g, n, sum_gn);  // g is 0 beyond the row, so n does not matter there
      at.store(r.dweight_sum + c, V::fma(dy, n, at.load(r.dweight_sum + c)));
      at.store(r.dbias_sum + c, at.load(r.dbias_sum + c) + dy);
    });
    const float count = static_cast<float>(num_columns);
    const F mean_g = V::set1(V::reduce_add(sum_g) / count), mean_gn = V::set1(V::reduce_add(sum_gn) / count);
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F n = normalized(c, at);
      const F g = at.load(r.dy + c) * at.load(r.weight + c);
      const F dresidual = rstd * V::fnma(n, mean_gn, g - mean_g);
      at.store(r.dresidual + c, dresidual);
      const F dx = keep_and_scale(dresidual, r.keep_bits, c, scale);
      if (r.dx != nullptr) at.store(r.dx + c, dx);
      if (r.dx_bias_sum != nullptr) at.store(r.dx_bias_sum + c, at.load(r.dx_bias_sum + c) + dx);
    });
  }

  static void fill_zero(float* p, int64_t num_columns) {
    for_columns(num_columns, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA { at.store(p + c, V::set1(0.0f)); });
  }

  static bool has_nan(const float* p, int64_t num_columns) {
    for (int64_t c = 0; c < num_columns; ++c) {
      if (p[c] != p[c]) return true;
    }
    return false;
  }

  static float softmax_forward(float* scores, const SoftmaxRow& row) {
    return row.bias == nullptr ? softmax_forward_of<false>(scores, row) : softmax_forward_of<true>(scores, row);
  }

  template <bool kBiased>
  static BERT_FAST_INLINE float softmax_forward_of(float* scores, const SoftmaxRow& row) {
    const SoftmaxRow r = row;
    const float minus_infinity = -INFINITY;
    // The largest is subtracted before scaling, so that its own exponent is exactly 0 however large the scores are: the
    // compiler makes one instruction of x * scale - max, whose result is as far from 0 as the product's rounding. With
    // a bias, scores are scaled, and rounded, in the first pass.
    const float size = kBiased ? 1.0f : fabsf(r.softmax_scale);
    const F sign = V::set1(copysignf(1.0f, r.softmax_scale)), scale = V::set1(kBiased ? r.softmax_scale : size);
    F lane_max = V::set1(minus_infinity);
    for_columns(r.num_keys, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      if constexpr (kBiased) {
        const F x = V::fma(at.load(scores + c), scale, at.load(r.bias + c));
        at.store(scores + c, x);
        lane_max = V::max(lane_max, at.valid_or(x, lane_max));
      } else {
        lane_max = V::max(lane_max, at.valid_or(at.load(scores + c) * sign, lane_max));
      }
    });
    float max = V::reduce_max(lane_max);
    if (max == minus_infinity) {
      if (!has_nan(scores, r.num_keys)) {
        fill_zero(scores, r.width);
        return minus_infinity;
      }
      max = NAN;  // the maximum passes over NaN
    }
    const F max_f = V::set1(max);
    const F zero = V::set1(0.0f);
    F lane_sum = zero;
    for_columns(r.num_keys, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F x = at.load(scores + c);
      const F e = kBiased ? exp(x - max_f) : exp((x * sign - max_f) * scale);
      at.store(scores + c, e);
      lane_sum = lane_sum + at.valid_or(e, zero);
    });
    const float sum = V::reduce_add(lane_sum);
    const F factor = V::set1((r.keep_bits == nullptr ? 1.0f : r.scale) / sum);
    for_columns(r.num_keys, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      const F e = at.load(scores + c);
      at.store(scores + c, (r.keep_bits == nullptr ? e : V::keep(e, r.keep_bits, c)) * factor);
    });
    fill_zero(scores + r.num_keys, r.width - r.num_keys);
    return max * size + logf(sum);
  }

  static void softmax_backward(float* scores, float* dp, float lse, const SoftmaxRow& row) {
    row.bias == nullptr ? softmax_backward_of<false>(scores, dp, lse, row)
                        : softmax_backward_of<true>(scores, dp, lse, row);
  }

  template <bool kBiased>
  static BERT_FAST_INLINE void softmax_backward_of(float* scores, float* dp, float lse, const SoftmaxRow& row) {
    const SoftmaxRow r = row;
    const F softmax_scale = V::set1(r.softmax_scale), lse_f = V::set1(lse), scale = V::set1(r.scale);
    const F zero = V::set1(0.0f);
    const bool empty = lse == -INFINITY;  // nothing to attend to: P is 0, not e^inf
    const int64_t num_keys = empty ? 0 : r.num_keys;
    F lane_delta = zero, lane_sum = zero;
    for_columns(num_keys, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      F x = at.load(scores + c);
      if constexpr (kBiased) {
        x = V::fma(x, softmax_scale, at.load(r.bias + c)) - lse_f;
      } else {
        x = x * softmax_scale - lse_f;
      }
      // At most 1, also where lse is so large that its rounding alone is more.
      const F p = exp(V::min(zero, x));
      const F dp_kept = keep_and_scale(at.load(dp + c), r.keep_bits, c, scale);
      lane_delta = V::fma(p, dp_kept, lane_delta);  // beyond the row's end dp_kept is 0 and p finite
      if constexpr (kBiased) lane_sum = lane_sum + at.valid_or(p, zero);
      at.store(scores + c, p);
      at.store(dp + c, dp_kept);
    });
    const float share = kBiased && !empty ? 1.0f / V::reduce_add(lane_sum) : 1.0f;
    const F delta = V::set1(V::reduce_add(lane_delta) * share), share_f = V::set1(share);
    for_columns(num_keys, [&](int64_t c, auto at) BERT_FAST_INLINE_LAMBDA {
      if constexpr (kBiased) {
        const F p = at.load(scores + c) * share_f, ds = p * (at.load(dp + c) - delta);
        if (r.dbias != nullptr) at.store(r.dbias + c, at.load(r.dbias + c) + ds);
        at.store(dp + c, ds * softmax_scale);
        at.store(scores + c, keep_and_scale(p, r.keep_bits, c, scale));
      } else {
        const F p = at.load(scores + c);
        at.store(dp + c, p * softmax_scale * (at.load(dp + c) - delta));
        if (r.keep_bits != nullptr) at.store(scores + c, V::keep(p, r.keep_bits, c) * scale);
      }
    });
    fill_zero(scores + num_keys, r.width - num_keys);
    fill_zero(dp + num_keys, r.width - num_keys);
  }

  // An m x n tile of c in registers: m rows of n vectors. 6 x 4 with 32 registers (24 sums, 4 of b, broadcasts of a
  // from memory) and 6 x 2 with 16 do 1.5 to 2.4 multiply-adds per load.
  template <int m, int n>
  static BERT_FAST_INLINE void matmul_tile(const Matmul& args, int64_t row, int64_t column) {
    const float* a = args.a + row * args.a_row_stride;
    const float* b = args.b + column;
    float* c = args.c + row * args.c_row_stride + column;
    const int64_t a_row_stride = args.a_row_stride, c_row_stride = args.c_row_stride;
    F sums[m][n];
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        sums[i][j] = args.accumulate ? V::load(c + i * c_row_stride + j * V::kLanes) : V::set1(0.0f);
      }
    }
    for (int64_t step = args.k; step > 0; --step) {
      F b_vectors[n];
      for (int j = 0; j < n; ++j) b_vectors[j] = V::load(b + j * V::kLanes);
      for (int i = 0; i < m; ++i) {
        const F a_value = V::set1(a[i * a_row_stride]);
        for (int j = 0; j < n; ++j) sums[i][j] = V::fma(a_value, b_vectors[j], sums[i][j]);
      }
      a += args.a_col_stride;
      b += args.b_row_stride;
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) V::store(c + i * c_row_stride + j * V::kLanes, sums[i][j]);
    }
  }

  // All rows of n vectors of columns: k x n vectors of b stay in the first-level cache.
  template <int n>
  static void matmul_columns(const Matmul& args, int64_t column) {
    int64_t row = 0;
    for (; row + 6 <= args.m; row += 6) matmul_tile<6, n>(args, row, column);
    if (row + 4 <= args.m) {
      matmul_tile<4, n>(args, row, column);
      row += 4;
    }
    if (row + 2 <= args.m) {
      matmul_tile<2, n>(args, row, column);
      row += 2;
    }
    if (row < args.m) matmul_tile<1, n>(args, row, column);
  }

  static void matmul(const Matmul& args) {
    constexpr int kTile = V::kTileVectors;
    int64_t column = 0;
    for (; column + kTile * V::kLanes <= args.n; column += kTile * V::kLanes) matmul_columns<kTile>(args, column);
    const int64_t vectors_left = (args.n - column) / V::kLanes;
    if (vectors_left == 1) matmul_columns<1>(args, column);
    if (vectors_left == 2) matmul_columns<2>(args, column);
    if (vectors_left == 3) matmul_columns<3>(args, column);
  }

  static void transpose(float* dst, int64_t dst_stride, const float* src, int64_t src_stride, int64_t num_rows,
                        int64_t num_cols) {
    const int64_t padded_rows = (num_rows + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns;
    for (int64_t row = 0; row < padded_rows; row += V::kLanes) {
      for (int64_t column = 0; column < num_cols; column += V::kLanes) {
        F block[V::kLanes];
        for (int i = 0; i < V::kLanes; ++i) {
          block[i] = row + i < num_rows ? V::load(src + (row + i) * src_stride + column) : V::set1(0.0f);
        }
        // Riffling the first half of the rows with the second half log2(kLanes) times transposes (Stone 1971).
        for (int stage = 1; stage < V::kLanes; stage *= 2) {
          F riffled[V::kLanes];
          for (int i = 0; i < V::kLanes / 2; ++i) {
            riffled[2 * i] = V::interleave_low(block[i], block[i + V::kLanes / 2]);
            riffled[2 * i + 1] = V::interleave_high(block[i], block[i + V::kLanes / 2]);
          }
          for (int i = 0; i < V::kLanes; ++i) block[i] = riffled[i];
        }
        for (int i = 0; i < V::kLanes; ++i) V::store(dst + (column + i) * dst_stride + row, block[i]);
      }
    }
  }
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_KERNELS_BODY_H_
