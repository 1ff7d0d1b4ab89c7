// Attention against double-precision loops, and the small matrix products and transposes under it, on exactly sized
// buffers so that a sanitizer sees every access beyond them.

#include <algorithm>
#include <limits>

#include "cpu/attention.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

void test_matmul() {
  Values values(1);
  for (const int64_t m : {1, 2, 3, 5, 6, 7, 11, 24}) {
    for (const int64_t n : {16, 32, 48, 80, 112}) {
      for (const int64_t k : {0, 1, 9}) {
        for (const bool transposed : {false, true}) {
          const std::vector<float> a = values.vector(m * k), b = values.vector(k * n), before = values.vector(m * n);
          const int64_t row_stride = transposed ? 1 : k, col_stride = transposed ? m : 1;
          for (const bool accumulate : {false, true}) {
            std::vector<float> c = before;
            kernels().matmul({m, n, k, a.data(), row_stride, col_stride, b.data(), n, c.data(), n, accumulate});
            for (int64_t i = 0; i < m; ++i) {
              for (int64_t j = 0; j < n; ++j) {
                const size_t element = static_cast<size_t>(i * n + j);
                double expected = accumulate ? before[element] : 0.0;
                for (int64_t l = 0; l < k; ++l) {
                  expected += double{a[static_cast<size_t>(i * row_stride + l * col_stride)]} *
                              b[static_cast<size_t>(l * n + j)];
                }
                CHECK(is_close(c[element], expected, 2e-6));
              }
            }
          }
        }
      }
    }
  }
}

void test_transpose() {
  Values values(2);
  for (const int64_t num_rows : {1, 15, 16, 17, 40}) {
    for (const int64_t num_cols : {16, 48}) {
      const int64_t src_stride = num_cols + 5, padded_rows = (num_rows + 15) / 16 * 16, dst_stride = padded_rows + 16;
      const std::vector<float> src = values.vector(num_rows * src_stride - 5);
      std::vector<float> dst(static_cast<size_t>(num_cols * dst_stride - 16), 7.0f);
      kernels().transpose(dst.data(), dst_stride, src.data(), src_stride, num_rows, num_cols);
      for (int64_t c = 0; c < num_cols; ++c) {
        for (int64_t r = 0; r < padded_rows; ++r) {
          const float expected = r < num_rows ? src[static_cast<size_t>(r * src_stride + c)] : 0.0f;
          CHECK(dst[static_cast<size_t>(c * dst_stride + r)] == expected);
        }
      }
    }
  }
}

struct AttentionRun {
  std::vector<float> out, lse, dq, dk, dv;
};

// Three sequences of self-attention, the middle one empty; q, k and v are slices of one tensor [T, 3, A, D].
AttentionRun run_attention(int64_t d, bool causal, uint32_t threshold, int num_threads) {
  constexpr int64_t num_heads = 3, num_tokens = 150;
  const int64_t token = num_heads * d;
  const int32_t cu_seqlens[4] = {0, 101, 101, num_tokens};
  std::vector<int32_t> coords;
  for (int32_t i = 0; i < num_tokens; ++i) {
    coords.push_back(i < 101 ? 4 : 6);
    coords.push_back(i < 101 ? 2 * i + 3 : i - 101);  // every other position of the first is missing
  }
  const DropoutSpec spec{99, 1, threshold, 65536.0f / static_cast<float>(65536 - threshold)};
  Values values(3);
  const std::vector<float> qkv = values.vector(num_tokens * 3 * token, 2.0f), dout = values.vector(num_tokens * token);
  AttentionRun run;
  for (std::vector<float>* x : {&run.out, &run.dq, &run.dk, &run.dv}) x->resize(dout.size());
  run.lse.resize(num_heads * num_tokens);
  const Packed<const float> q{qkv.data(), 3 * token}, k{qkv.data() + token, 3 * token};
  const Packed<const float> v{qkv.data() + 2 * token, 3 * token};
  const Coords of_tokens{coords.data()};
  const AttentionShape shape{cu_seqlens, cu_seqlens, 3,          num_tokens, num_tokens, num_heads,
                             d,          0.25f,      num_tokens, of_tokens,  of_tokens,  causal};
  attention_forward(q, k, v, {run.out.data(), token}, run.lse.data(), shape, spec, num_threads);
  attention_backward({dout.data(), token}, q, k, v, run.lse.data(),
                     {{run.dq.data(), token}, {run.dk.data(), token}, {run.dv.data(), token}}, shape, spec,
                     num_threads);

  std::vector<double> dq(dout.size()), dk(dout.size()), dv(dout.size());
  for (int64_t h = 0; h < num_heads; ++h) {
    for (int64_t i = 0; i < num_tokens; ++i) {
      const int64_t begin = i < 101 ? 0 : 101, end = causal ? i + 1 : i < 101 ? 101 : num_tokens;
      const Coords names{coords.data()};
      std::vector<double> p, dp;
      double sum = 0.0, delta = 0.0;
      for (int64_t j = begin; j < end; ++j) {
        double score = 0.0;
        for (int64_t c = 0; c < d; ++c) score += double{q.at(i, h, d)[c]} * k.at(j, h, d)[c];
        p.push_back(std::exp(0.25 * score));
        sum += p.back();
      }
      CHECK(is_close(run.lse[static_cast<size_t>(h * num_tokens + i)], std::log(sum), 2e-6));
      std::vector<double> out(static_cast<size_t>(d));
      for (int64_t j = begin; j < end; ++j) {
        const size_t l = static_cast<size_t>(j - begin);
        p[l] /= sum;
        const bool keep = kept_probability(spec, names.row(i), static_cast<uint32_t>(names.position(i)),
                                           static_cast<uint32_t>(h), static_cast<uint32_t>(l));
        const double factor = keep ? spec.scale : 0.0;
        double product = 0.0;
        for (int64_t c = 0; c < d; ++c) {
          const double gradient = dout[static_cast<size_t>(i * token + h * d + c)];
          out[static_cast<size_t>(c)] += p[l] * factor * v.at(j, h, d)[c];
          dv[static_cast<size_t>(j * token + h * d + c)] += p[l] * factor * gradient;
          product += gradient * v.at(j, h, d)[c];
        }
        dp.push_back(product * factor);
        delta += p[l] * dp[l];
      }
      for (int64_t c = 0; c < d; ++c) {
        CHECK(is_close(run.out[static_cast<size_t>(i * token + h * d + c)], out[static_cast<size_t>(c)], 1e-5));
      }
      for (int64_t j = begin; j < end; ++j) {
        const size_t l = static_cast<size_t>(j - begin);
        const double ds = 0.25 * p[l] * (dp[l] - delta);
        for (int64_t c = 0; c < d; ++c) {
          dq[static_cast<size_t>(i * token + h * d + c)] += ds * k.at(j, h, d)[c];
          dk[static_cast<size_t>(j * token + h * d + c)] += ds * q.at(i, h, d)[c];
        }
      }
    }
  }
  for (size_t element = 0; element < dq.size(); ++element) {
    CHECK(is_close(run.dq[element], dq[element], 2e-5));
    CHECK(is_close(run.dk[element], dk[element], 2e-5));
    CHECK(is_close(run.dv[element], dv[element], 2e-5));
  }
  return run;
}

void test_attention() {
  for (const int64_t head_dim : {1, 24, 32}) {
    for (const bool causal : {false, true}) {
      for (const uint32_t threshold : {0u, 6554u}) {
        const AttentionRun one = run_attention(head_dim, causal, threshold, 1);
        const AttentionRun three = run_attention(head_dim, causal, threshold, 3);
        CHECK(one.out == three.out && one.lse == three.lse);
        CHECK(one.dq == three.dq && one.dk == three.dk && one.dv == three.dv);
      }
    }
  }
}

// Whether both passes refuse this shape, of 5 queries and 5 keys, before they write.
bool is_refused(const AttentionShape& shape, bool has_q = true) {
  const std::vector<float> x(5 * 2 * 8, 1.0f);
  std::vector<float> y(x.size(), 7.0f), lse(2 * 5, 7.0f);
  const std::vector<float> y_before = y, lse_before = lse;
  const Packed<const float> in{x.data(), 16}, q{has_q ? x.data() : nullptr, 16};
  const Packed<float> out{y.data(), 16};
  const bool forward = throws_invalid_argument(
      [&] { attention_forward(q, in, in, out, lse.data(), shape, DropoutSpec{0, 0, 0, 1.0f}, 1); });
  const bool backward = throws_invalid_argument(
      [&] { attention_backward(in, q, in, in, lse.data(), {out, out, out}, shape, DropoutSpec{0, 0, 0, 1.0f}, 1); });
  CHECK(forward == backward && (!forward || (y == y_before && lse == lse_before)));
  return forward;
}

void test_refusals() {
  const int32_t good[3] = {0, 2, 5};
  const auto shape = [](const int32_t* cu_q, const int32_t* cu_k) {
    return AttentionShape{cu_q, cu_k, 2, 5, 5, 2, 8, 0.25f, 5, Coords{nullptr}, Coords{nullptr}, false};
  };
  CHECK(!is_refused(shape(good, good)));
  CHECK(is_refused(shape(good, good), false));
  const int32_t bad[][3] = {{0, 2, 6}, {0, 2, 4}, {1, 2, 5}, {0, -1, 5}, {0, 6, 5}, {-1, 2, 5}, {0, 2, 1 << 30}};
  for (const int32_t (&offsets)[3] : bad) {
    CHECK(is_refused(shape(offsets, good)));
    CHECK(is_refused(shape(good, offsets)));
  }
  CHECK(is_refused(shape(nullptr, good)));
  AttentionShape changed = shape(good, good);
  changed.lse_stride = 4;
  CHECK(is_refused(changed));
  changed = shape(good, good);
  changed.num_sequences = -1;
  CHECK(is_refused(changed));
  changed = shape(good, good);
  changed.causal = true;
  CHECK(is_refused(changed));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    test_matmul();
    test_transpose();
    test_attention();
    test_refusals();
  });
  return 0;
}
