// Kernels of int8 products, one table of function pointers per instruction set: kernels.h says how tables are chosen.
//
// Every one gives the same bits: sums are integers, and the few roundings around them are single IEEE operations. The
// definition is bert_fast/reference/linear_int8.py. A multiplication and the addition after it may therefore not become
// one operation: files named int8_* are compiled with -ffp-contract=off.

#ifndef BERT_FAST_CPU_INT8_H_
#define BERT_FAST_CPU_INT8_H_

#include <cstdint>

namespace bert_fast::cpu {

// Weights lie in blocks of kInt8Columns columns: of each, kInt8Depth values of k side by side for one column after the
// other; k padded with zeros to a multiple of kInt8Steps, columns to one of kInt8Columns. It is what the dot products
// of AVX-512 read as vectors, and AMX as tiles.
constexpr int64_t kInt8Columns = 16, kInt8Depth = 4, kInt8Steps = 64;
// Rows that AMX reads at a time, whether there are as many or not.
constexpr int64_t kInt8Rows = 32;

constexpr int64_t int8_padded(int64_t k) { return (k + kInt8Steps - 1) / kInt8Steps * kInt8Steps; }

// x = scale * (q - zero) of a row.
struct Int8Row {
  float scale;  // NaN where the row holds NaN or an infinity
  int32_t zero;
};

// y [rows, columns] = scale_of_row * scale_of_column * sum((q - zero) * weight) + bias.
struct Int8Tiles {
  int64_t num_rows, num_columns, k;  // k padded
  const uint8_t* q;                  // rows of k bytes; readable up to a multiple of kInt8Rows
  const Int8Row* rows;
  const int8_t* packed;
  const float* scale;   // of the columns
  const int32_t* sums;  // of the weights of each column
  const float* bias;    // nullptr: none
  float* y;
  int64_t y_stride;
};

struct Int8Kernels {
  // Writes q, k padded with zeros.
  Int8Row (*quantize)(const float* x, int64_t k, uint8_t* q);
  void (*linear)(const Int8Tiles& args);
};

// The table in use, see kernels() in kernels.h.
const Int8Kernels& int8_kernels();

// The tables; nullptr where the compiler was not given the instruction set.
const Int8Kernels* portable_int8_kernels();
const Int8Kernels* avx2_int8_kernels();
const Int8Kernels* avx512_int8_kernels();
const Int8Kernels* avx512vnni_int8_kernels();
const Int8Kernels* amx_int8_kernels();

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_INT8_H_
