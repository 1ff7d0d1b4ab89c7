// Dropout of [num_rows, num_cols] tensors of fp32 values, and its mask, on raw buffers.
//
// The caller owns every buffer. coords is [num_rows, 2] int32: (row, position) of every token, as in
// bert_fast/reference/dropout.py. num_threads <= 0: as many as there are. Cost: one Philox call per 8 elements, about
// half an instruction per element with AVX-512. Errors: std::invalid_argument.

#ifndef BERT_FAST_CPU_DROPOUT_H_
#define BERT_FAST_CPU_DROPOUT_H_

#include <cstdint>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

// dst [num_rows, num_cols] contiguous = src * keep * scale; rows of src start src_row_stride floats apart; dst may be
// src where the stride is num_cols.
void dropout(float* dst, const float* src, int64_t num_rows, int64_t num_cols, int64_t src_row_stride,
             const int32_t* coords, const DropoutSpec& spec, int num_threads);

// mask [num_rows, num_cols] = 1 where kept, else 0.
void keep_mask(uint8_t* mask, int64_t num_rows, int64_t num_cols, const int32_t* coords, const DropoutSpec& spec,
               int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_DROPOUT_H_
