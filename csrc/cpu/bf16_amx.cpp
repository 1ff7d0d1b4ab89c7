// AMX: tiles of 16 rows by 32 values, 8,192 products in one instruction.
//
// The left operand of a tile product is read along its rows, the right one by pairs of k: [k / 2][column][2]. Weights
// are the left one, as they lie, so x is turned when it is rounded, and sums [columns of y, rows of y] before they are
// stored.

#include "cpu/bf16.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include "cpu/bf16_avx512bf16_traits.h"
#include "cpu/bf16_body.h"

namespace bert_fast::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;
constexpr int64_t kTileValues = kTileRows * kBf16Steps;

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfig) == 64);

// Row i of 16 words each becomes column i.
BERT_FAST_INLINE void transpose(__m512i (&rows)[16]) {
  __m512i by_two[16], by_four[16];
  for (int i = 0; i < 16; i += 2) {
    by_two[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    by_two[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    by_four[i] = _mm512_unpacklo_epi64(by_two[i], by_two[i + 2]);
    by_four[i + 1] = _mm512_unpackhi_epi64(by_two[i], by_two[i + 2]);
    by_four[i + 2] = _mm512_unpacklo_epi64(by_two[i + 1], by_two[i + 3]);
    by_four[i + 3] = _mm512_unpackhi_epi64(by_two[i + 1], by_two[i + 3]);
  }
  // by_four[4 g + c]: of rows 4 g to 4 g + 3 the words c, 4 + c, 8 + c and 12 + c.
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(by_four[c], by_four[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(by_four[c], by_four[4 + c], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(by_four[8 + c], by_four[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(by_four[8 + c], by_four[12 + c], 0xDD);
    rows[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    rows[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

__mmask16 first_of(int64_t n) { return static_cast<__mmask16>(n <= 0 ? 0 : n >= 16 ? 0xFFFF : (1u << n) - 1); }

// Tiles of pairs of k, one after the other along k, for each 16 rows of x.
void pack(const float* x, int64_t x_stride, int64_t num_rows, int64_t k, Bf16* packed) {
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const int64_t rows = num_rows - first;
    for (int64_t c = 0; c < k; c += kBf16Steps) {
      const __mmask16 low = first_of(k - c), high = first_of(k - c - 16);
      __m512i pairs[kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        const bool is_there = i < rows;
        const float* const p = x + (first + (is_there ? i : 0)) * x_stride + c;
        const __m512 left = _mm512_maskz_loadu_ps(is_there ? low : 0, p);
        const __m512 right = _mm512_maskz_loadu_ps(is_there ? high : 0, p + 16);
        const __m512bh rounded = _mm512_cvtne2ps_pbh(right, left);
        __builtin_memcpy(&pairs[i], &rounded, sizeof(rounded));
      }
      transpose(pairs);
      for (int i = 0; i < kTileRows; ++i) _mm512_storeu_si512(packed + 2 * kTileRows * i, pairs[i]);
      packed += kTileValues;
    }
  }
}

// sums [16 columns of y, 16 rows of y], to y and beside the bias.
void finish(const Bf16Tiles& a, const float* sums, int64_t row, int64_t column) {
  __m512i words[kTileRows];
  for (int i = 0; i < kTileRows; ++i) words[i] = _mm512_load_si512(sums + i * kTileRows);
  transpose(words);
  const __mmask16 columns = first_of(a.num_columns - column);
  const __m512 bias = a.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(columns, a.bias + column);
  const int rows = static_cast<int>(a.num_rows - row < kTileRows ? a.num_rows - row : kTileRows);
  for (int i = 0; i < rows; ++i) {
    _mm512_mask_storeu_ps(a.y + (row + i) * a.y_stride + column, columns,
                          _mm512_add_ps(_mm512_castsi512_ps(words[i]), bias));
  }
}

// sums [16 columns of y, 16 rows of y], to y as they are.
void finish_turned(const Bf16Tiles& a, const float* sums, int64_t row, int64_t column) {
  const __mmask16 rows = first_of(a.num_rows - row);
  const int64_t columns = a.num_columns - column < kTileRows ? a.num_columns - column : kTileRows;
  for (int64_t i = 0; i < columns; ++i) {
    _mm512_mask_storeu_ps(a.y + (column + i) * a.y_stride + row, rows, _mm512_load_ps(sums + i * kTileRows));
  }
}

// 16 or 32 columns of y by 16 or 32 rows of y. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x: a tile's
// number must be a constant. prefetches: the weights of the next columns are asked for.
template <bool is_turned, bool has_lower, bool has_right, bool prefetches>
void tiles(const Bf16Tiles& a, int64_t row, int64_t column) {
  const Bf16* weight = a.weight + column * a.weight_stride;
  const Bf16* x = a.x + row * a.k;
  const int64_t lower = kTileRows * a.weight_stride, right = kTileRows * a.k;
  const int64_t stride = a.weight_stride * static_cast<int64_t>(sizeof(Bf16));
  _tile_zero(0);
  if (has_right) _tile_zero(1);
  if (has_lower) _tile_zero(2);
  if (has_lower && has_right) _tile_zero(3);
  for (int64_t k = 0; k < a.k; k += kBf16Steps, weight += kBf16Steps, x += kTileValues) {
    _tile_loadd(4, weight, stride);
    _tile_loadd(6, x, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (has_right) {
      _tile_loadd(7, x + right, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (has_lower) {
      _tile_loadd(5, weight + lower, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (has_right) _tile_dpbf16ps(3, 5, 7);
    }
    if (prefetches) {
      for (int i = 0; i < 2 * kTileRows; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(weight + 2 * lower + i * a.weight_stride), _MM_HINT_T0);
      }
    }
  }
  if (is_turned && a.num_columns - column >= (has_lower ? 2 : 1) * kTileRows &&
      a.num_rows - row >= (has_right ? 2 : 1) * kTileRows) {
    float* const y = a.y + column * a.y_stride + row;
    const int64_t y_bytes = a.y_stride * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, y, y_bytes);
    if (has_right) _tile_stored(1, y + kTileRows, y_bytes);
    if (has_lower) _tile_stored(2, y + kTileRows * a.y_stride, y_bytes);
    if (has_lower && has_right) _tile_stored(3, y + kTileRows * a.y_stride + kTileRows, y_bytes);
    return;
  }
  alignas(64) float sums[4][kTileRows * kTileRows];
  _tile_stored(0, sums[0], kTileBytes);
  if (has_right) _tile_stored(1, sums[1], kTileBytes);
  if (has_lower) _tile_stored(2, sums[2], kTileBytes);
  if (has_lower && has_right) _tile_stored(3, sums[3], kTileBytes);
  constexpr auto store = is_turned ? finish_turned : finish;
  store(a, sums[0], row, column);
  if (has_right) store(a, sums[1], row + kTileRows, column);
  if (has_lower) store(a, sums[2], row, column + kTileRows);
  if (has_lower && has_right) store(a, sums[3], row + kTileRows, column + kTileRows);
}

template <bool is_turned, bool has_lower>
void rows_of_columns(const Bf16Tiles& a, int64_t column) {
  int64_t row = 0;
  const bool is_last = a.num_columns - column <= 4 * kTileRows;
  if (a.num_rows > kTileRows && !is_last) {
    tiles<is_turned, has_lower, true, true>(a, row, column);
    row += 2 * kTileRows;
  } else if (!is_last) {
    tiles<is_turned, has_lower, false, true>(a, row, column);
    row += kTileRows;
  }
  for (; a.num_rows - row > kTileRows; row += 2 * kTileRows) tiles<is_turned, has_lower, true, false>(a, row, column);
  if (row < a.num_rows) tiles<is_turned, has_lower, false, false>(a, row, column);
}

template <bool is_turned>
void linear(const Bf16Tiles& args) {
  const Bf16Tiles a = args;  // a copy that stores through float* cannot change
  const TileConfig config;
  _tile_loadconfig(&config);
  int64_t column = 0;
  for (; a.num_columns - column > kTileRows; column += 2 * kTileRows) rows_of_columns<is_turned, true>(a, column);
  if (column < a.num_columns) rows_of_columns<is_turned, false>(a, column);
  _tile_release();  // a thread that holds tiles costs the system more
}

constexpr Bf16Kernels kTable = {Bf16Body<Avx512Bf16>::round, pack, linear<false>, linear<true>};

}  // namespace

const Bf16Kernels* amx_bf16_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Bf16Kernels* amx_bf16_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
