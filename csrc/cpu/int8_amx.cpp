// AMX: tiles of 16 rows by 64 bytes, 16,384 products of bytes in one instruction.

#include "cpu/int8.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#include "cpu/int8_avx512_traits.h"
#include "cpu/int8_body.h"

namespace bert_fast::cpu {
namespace {

using Body = Int8Body<Avx512Base>;

constexpr int kTileRows = 16, kTileBytes = 64;

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfig) == 64);

// Up to 32 rows of two blocks of columns, of which the second may not be there. Tiles 0 to 3 are sums, 4 and 5 rows of
// q, 6 and 7 weights: a tile's number must be a constant.
template <bool has_lower, bool has_right>
void tiles(const Int8Tiles& a, int64_t row, int64_t column) {
  const uint8_t* const q = a.q + row * a.k;
  const int8_t* const left = a.packed + column * a.k;
  const int8_t* const right = left + kInt8Columns * a.k;
  _tile_zero(0);
  if (has_right) _tile_zero(1);
  if (has_lower) _tile_zero(2);
  if (has_lower && has_right) _tile_zero(3);
  for (int64_t k = 0; k < a.k; k += kInt8Steps) {
    _tile_loadd(6, left + kInt8Columns * k, kTileBytes);
    if (has_right) _tile_loadd(7, right + kInt8Columns * k, kTileBytes);
    _tile_loadd(4, q + k, static_cast<int>(a.k));
    _tile_dpbusd(0, 4, 6);
    if (has_right) _tile_dpbusd(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, q + kTileRows * a.k + k, static_cast<int>(a.k));
      _tile_dpbusd(2, 5, 6);
      if (has_right) _tile_dpbusd(3, 5, 7);
    }
  }
  alignas(64) int32_t sums[4][kTileRows * kInt8Columns];
  _tile_stored(0, sums[0], kTileBytes);
  if (has_right) _tile_stored(1, sums[1], kTileBytes);
  if (has_lower) _tile_stored(2, sums[2], kTileBytes);
  if (has_lower && has_right) _tile_stored(3, sums[3], kTileBytes);
  const int64_t left_rows = a.num_rows - row;
  const int rows =
      left_rows < (has_lower ? 2 : 1) * kTileRows ? static_cast<int>(left_rows) : (has_lower ? 2 : 1) * kTileRows;
  for (int i = 0; i < rows; ++i) {
    const int32_t* const of_row = sums[i / kTileRows * 2] + i % kTileRows * kInt8Columns;
    Body::finish(a, row + i, column, Avx512Base::load_ints(of_row));
    if (has_right) {
      Body::finish(a, row + i, column + kInt8Columns, Avx512Base::load_ints(of_row + kTileRows * kInt8Columns));
    }
  }
}

template <bool has_right>
void rows_of_blocks(const Int8Tiles& a, int64_t column) {
  int64_t row = 0;
  for (; a.num_rows - row > kTileRows; row += 2 * kTileRows) tiles<true, has_right>(a, row, column);
  if (row < a.num_rows) tiles<false, has_right>(a, row, column);
}

void linear(const Int8Tiles& args) {
  const Int8Tiles a = args;  // a copy that stores through float* cannot change
  const TileConfig config;
  _tile_loadconfig(&config);
  int64_t column = 0;
  for (; a.num_columns - column > kInt8Columns; column += 2 * kInt8Columns) rows_of_blocks<true>(a, column);
  if (column < a.num_columns) rows_of_blocks<false>(a, column);
  _tile_release();  // a thread that holds tiles costs the system more
}

constexpr Int8Kernels kTable = {Body::quantize, linear};

}  // namespace

const Int8Kernels* amx_int8_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Int8Kernels* amx_int8_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
