// Kernels of the CPU routines of back-end "torch", one table of function pointers per instruction set.
//
// A kernel works on fp32 values that fit in the first two cache levels, most on one row; the files beside this one walk
// the rows, split them over threads and know what a row means. kernels_body.h holds the one body of every kernel,
// compiled for each instruction set by kernels_<name>.cpp. Dropout masks are the same bits in all of them; results of
// floating-point sums differ by a few units in the last place, because the width of the partial sums differs.
//
// The definition of dropout is bert_fast/reference/dropout.py: Philox4x32 with 7 rounds (Salmon et al. 2011), one
// 16-bit value per column, 8 columns per block.

#ifndef BERT_FAST_CPU_KERNELS_H_
#define BERT_FAST_CPU_KERNELS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace bert_fast::cpu {

// What to draw and what to do with it. threshold 0 keeps everything (scale is then 1), 65536 nothing.
struct DropoutSpec {
  uint64_t seed = 0;
  uint32_t site = 0;
  uint32_t threshold = 0;  // an element is kept iff its 16-bit value >= threshold
  float scale = 1.0f;      // factor of kept elements

  bool active() const { return threshold != 0; }
};

constexpr int64_t kColumnsPerBlock = 8;

// Keep bits: one byte per block of 8 columns, bit j = column 8 * block + j, 1 = kept. Writers fill whole vectors and
// readers look one byte ahead, so a buffer has this many bytes.
constexpr int64_t keep_bits_bytes(int64_t num_columns) { return (num_columns + 63) / 64 * 8 + 8; }

// One row of h = residual + dropout(x + x_bias); y = (h - mean) * rstd * weight + bias.
struct LayerNormForwardRow {
  const float* x;
  const float* x_bias;  // nullptr: none
  const float* residual;
  const float* weight;
  const float* bias;
  float* h;  // may be y, x or residual: every element is read before it is written
  float* y;
  const uint8_t* keep_bits;  // nullptr: no dropout
  float scale;
  float eps;
};

struct LayerNormStatistics {
  float mean;
  float rstd;
};

// One row of the gradients; the three column sums are added to. The normalised row n = (h - mean) * rstd comes from h,
// or where `inverse` is given from y: n = (y - bias) * inverse.
struct LayerNormBackwardRow {
  const float* dy;
  const float* kept;  // h, or y
  const float* weight;
  const float* bias;               // nullptr with h
  const float* inverse;            // 1 / weight; nullptr with h
  LayerNormStatistics statistics;  // the mean is not read with y
  float* dresidual;
  float* dx;  // dropout(dresidual); nullptr: not stored
  float* dweight_sum;
  float* dbias_sum;
  float* dx_bias_sum;        // nullptr: not wanted
  const uint8_t* keep_bits;  // nullptr: no dropout
  float scale;
};

// One row of attention probabilities: num_keys of `width` columns are real, the rest becomes exactly 0.
struct SoftmaxRow {
  int64_t num_keys;
  int64_t width;
  float softmax_scale;
  const uint8_t* keep_bits;  // nullptr: no dropout
  float scale;
  const float* bias = nullptr;  // [num_keys], added to the scaled scores; nullptr: none
  float* dbias = nullptr;       // [num_keys], which the gradients are added to; nullptr: not wanted, or no bias
};

// The heads of a token, each of which has num_freqs pairs (x[i], x[i + num_freqs]).
struct TurnedHeads {
  const float* x;
  float* y;  // may be x
  const float* cos;
  const float* sin;
  int64_t x_stride, y_stride;  // from head to head
  int64_t num_heads;
  float sign;  // of the angles
};

// c [m, n] = a [m, k] b [k, n], or c += it. a may have any strides, so a transposed left side costs nothing; rows of b
// and c are contiguous and n is a multiple of kMatmulColumns.
struct Matmul {
  int64_t m, n, k;
  const float* a;
  int64_t a_row_stride, a_col_stride;
  const float* b;
  int64_t b_row_stride;
  float* c;
  int64_t c_row_stride;
  bool accumulate;
};
constexpr int64_t kMatmulColumns = 16;

// y [rows, columns] = x [rows, k] weight [columns, k]^T + bias, all read as they lie: rows of k floats. Every element
// is summed in an order that depends on k alone, not on how many rows or columns there are, nor on where it stands.
struct LinearTiles {
  int64_t num_rows, num_columns, k;
  const float* x;
  int64_t x_stride;
  const float* weight;
  int64_t weight_stride;
  const float* bias;  // nullptr: none
  float* y;
  int64_t y_stride;
};

enum class Activation { kGelu, kGeluTanh, kRelu, kSilu };

struct Kernels {
  // Keep bits of num_blocks blocks from first_block on, of the token (row, position). Writes whole vectors, that is
  // up to num_blocks rounded up to a multiple of 8.
  void (*keep_bits)(const DropoutSpec& spec, uint32_t row, uint32_t position, uint32_t first_block, int64_t num_blocks,
                    uint8_t* bits);

  // dst = src * keep * scale; dst may be src.
  void (*apply_keep_bits)(float* dst, const float* src, const uint8_t* bits, float scale, int64_t num_columns);

  LayerNormStatistics (*layer_norm_forward)(const LayerNormForwardRow& row, int64_t num_columns);
  void (*layer_norm_backward)(const LayerNormBackwardRow& row, int64_t num_columns);

  // scores <- softmax(softmax_scale * scores + bias) * keep * scale. Returns the natural log of the sum of
  // exponentials; -inf, and a row of zeros, when every score is -inf or there is none.
  float (*softmax_forward)(float* scores, const SoftmaxRow& row);
  // P = exp(softmax_scale * scores + bias - lse); dP = dp * keep * scale; scores <- P * keep * scale;
  // dS = P * (dP - sum(P * dP)); dbias += dS; dp <- softmax_scale * dS. With a bias P is divided by its sum: where one
  // pushed a whole row far down, the log of the number of keys is lost in lse's rounding.
  void (*softmax_backward)(float* scores, float* dp, float lse, const SoftmaxRow& row);

  // x: some 100 rows at most, which stay in the second cache level; weights come from farther away, once.
  void (*linear)(const LinearTiles& args);
  // dst[i] = activation(src[i]); dst may be src.
  void (*activate)(float* dst, const float* src, int64_t num_columns, Activation activation);

  // y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin of every pair.
  void (*turn_heads)(const TurnedHeads& heads, int64_t num_freqs);

  // Small matrix products from the first two cache levels: a sequence's attention.
  void (*matmul)(const Matmul& args);
  // dst[c][r] = src[r][c] for num_rows rows of num_cols columns, a multiple of 16; rows of dst are padded with zeros to
  // the next multiple of 16.
  void (*transpose)(float* dst, int64_t dst_stride, const float* src, int64_t src_stride, int64_t num_rows,
                    int64_t num_cols);
};

// The table in use: the fastest that this processor runs, unless force_simd_level chose another. Chosen once.
const Kernels& kernels();

// The name of the instruction set in use.
const char* simd_level();

// Names of the instruction sets that were compiled and that this processor runs, fastest first; "portable" is last.
std::vector<std::string> simd_levels();

// Makes every later call use the named one; "auto" goes back to the fastest. For tests and diagnostics: not to be
// called while another thread runs a routine whose results are to be compared. Throws std::invalid_argument.
void force_simd_level(const std::string& name);

struct CpuFeature {
  const char* name;
  bool present;
};
// What the dispatcher looks at; empty on machines other than x86-64.
std::vector<CpuFeature> cpu_features();

// The tables; nullptr where the compiler was not given the instruction set.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_KERNELS_H_
