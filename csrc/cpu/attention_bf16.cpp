#include "cpu/attention_bf16.h"

#include <algorithm>

#include "cpu/attention_rows.h"
#include "cpu/attention_work.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace bert_fast::cpu {
namespace {

// Query rows per block: their scores against 512 keys are 128 KiB. A multiple of kBf16Columns.
constexpr int64_t kBlockRows = 64;

}  // namespace

bool runs_attention_bf16() { return bf16_kernels().linear_turned != nullptr; }

void attention_forward_bf16(Packed<const float> q, Packed<const float> k, Packed<const float> v, Packed<float> out,
                            const AttentionShape& shape, int num_threads) {
  const Kernels& kernel = kernels();
  const Bf16Kernels& bf16 = bf16_kernels();
  const int64_t d = shape.head_dim, d_width = padded(d), d_bf16 = bf16_padded(d);
  require_address("q", q.data, shape.num_q_tokens);
  require_address("k", k.data, shape.num_k_tokens);
  require_address("v", v.data, shape.num_k_tokens);
  require_address("out", out.data, shape.num_q_tokens);
  Work work(shape, DropoutSpec{}, num_threads);
  const int64_t max_width = padded(work.max_keys()), max_stride = row_stride(max_width);
  const int64_t max_bf16 = bf16_padded(work.max_keys());
  run_threads(work.num_threads(), [&](int) {
    const Scratch v_transposed(d_width * max_stride), v_rows(d_width * max_width), scores(kBlockRows * max_stride);
    const Bf16Scratch q_rounded(kBlockRows * d_bf16), probs(kBlockRows * max_bf16);
    const Bf16Scratch k_packed(max_bf16 * d_bf16), v_packed(d_bf16 * max_bf16);
    work.take([&](const Sequence& sequence, int64_t head, bool) {
      const int64_t num_keys = sequence.num_k, keys_bf16 = bf16_padded(num_keys);
      const int64_t width = padded(num_keys), stride = row_stride(width);
      const float* const values = v.at(sequence.first_k, head, d);
      transpose_rows(kernel, v_transposed.get(), stride, values, v.stride, num_keys, d, v_rows.get());
      bf16.pack(v_transposed.get(), stride, d, num_keys, v_packed.get());
      bf16.pack(k.at(sequence.first_k, head, d), k.stride, num_keys, d, k_packed.get());
      for (int64_t begin = 0; begin < sequence.num_q; begin += kBlockRows) {
        const int64_t m = std::min(kBlockRows, sequence.num_q - begin), token = sequence.first_q + begin;
        for (int64_t i = 0; i < m; ++i) {
          bf16.round(q.at(token + i, head, d), d, q_rounded.get() + i * d_bf16);
        }
        bf16.linear_turned(
            {num_keys, m, d_bf16, k_packed.get(), q_rounded.get(), d_bf16, nullptr, scores.get(), stride});
        for (int64_t i = 0; i < m; ++i) {
          float* const row = scores.get() + i * stride;
          kernel.softmax_forward(row, {num_keys, width, shape.softmax_scale, nullptr, 1.0f});
          bf16.round(row, num_keys, probs.get() + i * keys_bf16);
        }
        bf16.linear_turned(
            {d, m, keys_bf16, v_packed.get(), probs.get(), keys_bf16, nullptr, out.at(token, head, d), out.stride});
      }
    });
  });
}

}  // namespace bert_fast::cpu
