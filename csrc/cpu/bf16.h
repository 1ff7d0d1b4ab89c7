// Kernels of bf16 products, one table of function pointers per instruction set: kernels.h says how tables are chosen.
//
// Inputs are rounded to bf16, to nearest, ties to even; sums are in fp32, in an order that depends on k alone, and
// differ between instruction sets by their rounding. AMX and AVX512_BF16 take subnormal numbers for zeros, in inputs
// and in sums; the others do not.

#ifndef BERT_FAST_CPU_BF16_H_
#define BERT_FAST_CPU_BF16_H_

#include <cstdint>

namespace bert_fast::cpu {

using Bf16 = uint16_t;  // the upper half of a float's bits

// What AMX multiplies at a time: values of k, rows of x and columns of y, whether there are as many or not.
constexpr int64_t kBf16Steps = 32, kBf16Rows = 32, kBf16Columns = 16;

constexpr int64_t bf16_padded(int64_t k) { return (k + kBf16Steps - 1) / kBf16Steps * kBf16Steps; }

// y [rows, columns] = x weight^T + bias.
struct Bf16Tiles {
  int64_t num_rows, num_columns, k;  // k padded
  const Bf16* x;                     // as `pack` left it
  const Bf16* weight;                // rows of k values; readable up to a multiple of kBf16Columns
  int64_t weight_stride;
  const float* bias;  // nullptr: none
  float* y;
  int64_t y_stride;
};

struct Bf16Kernels {
  // Rounds k values, and pads them with zeros.
  void (*round)(const float* x, int64_t k, Bf16* rounded);
  // Rounds rows of k values and lays them out as `linear` reads them: kBf16Rows or a multiple of it, of k padded each.
  void (*pack)(const float* x, int64_t x_stride, int64_t num_rows, int64_t k, Bf16* packed);
  void (*linear)(const Bf16Tiles& args);
  // Without bias, y [columns, rows], rows y_stride apart. nullptr: there is none that is faster than fp32's.
  void (*linear_turned)(const Bf16Tiles& args);
};

// The table in use, see kernels() in kernels.h.
const Bf16Kernels& bf16_kernels();

// The tables; nullptr where the compiler was not given the instruction set.
const Bf16Kernels* portable_bf16_kernels();
const Bf16Kernels* avx2_bf16_kernels();
const Bf16Kernels* avx512_bf16_kernels();
const Bf16Kernels* avx512bf16_bf16_kernels();
const Bf16Kernels* amx_bf16_kernels();

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_BF16_H_
