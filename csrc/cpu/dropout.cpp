#include "cpu/dropout.h"

#include <cstring>

#include "cpu/keep_bits.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {

void dropout(float* dst, const float* src, int64_t num_rows, int64_t num_cols, int64_t src_row_stride,
             const int32_t* coords, const DropoutSpec& spec, int num_threads) {
  require_shape(num_rows, num_cols);
  require_coords(spec, coords, num_rows);
  require_address("dst", dst, num_rows * num_cols);
  require_address("src", src, num_rows * num_cols);
  const Kernels& k = kernels();
  split_range(num_rows, useful_threads(num_rows * num_cols, num_threads), [&](int64_t begin, int64_t end) {
    TokenKeepBits bits(k, spec, coords, num_cols);
    for (int64_t i = begin; i < end; ++i) {
      float* dst_row = dst + i * num_cols;
      const float* src_row = src + i * src_row_stride;
      if (spec.active()) {
        k.apply_keep_bits(dst_row, src_row, bits.draw(i), spec.scale, num_cols);
      } else if (dst_row != src_row) {
        std::memcpy(dst_row, src_row, static_cast<size_t>(num_cols) * sizeof(float));
      }
    }
  });
}

void keep_mask(uint8_t* mask, int64_t num_rows, int64_t num_cols, const int32_t* coords, const DropoutSpec& spec,
               int num_threads) {
  require_shape(num_rows, num_cols);
  require_coords(spec, coords, num_rows);
  require_address("dst", mask, num_rows * num_cols);
  const Kernels& k = kernels();
  split_range(num_rows, useful_threads(num_rows * num_cols, num_threads), [&](int64_t begin, int64_t end) {
    TokenKeepBits bits(k, spec, coords, num_cols);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* row_bits = bits.draw(i);
      uint8_t* mask_row = mask + i * num_cols;
      for (int64_t c = 0; c < num_cols; ++c) {
        mask_row[c] = row_bits == nullptr ? 1 : row_bits[c / 8] >> (c % 8) & 1;
      }
    }
  });
}

}  // namespace bert_fast::cpu
