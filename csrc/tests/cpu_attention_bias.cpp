// A bias on the scores of attention, and its gradient, against double-precision loops, on exactly sized buffers so that
// a sanitizer sees every access beyond them.

#include <algorithm>
#include <limits>

#include "cpu/attention.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

constexpr int64_t kHeads = 2, kHeadDim = 8, kToken = kHeads * kHeadDim;
constexpr double kScale = 0.25;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A bias of any sizes whose elements lie in any order of its dimensions, the innermost first.
struct Bias {
  std::vector<float> elements;
  ScoreBias view;

  Bias(Values& values, const int64_t (&sizes)[4], const int (&order)[4], int64_t gap) {
    int64_t stride = 1 + gap, last = 0;
    for (const int dim : order) {
      view.sizes[dim] = sizes[dim];
      view.strides[dim] = stride;
      last += (sizes[dim] - 1) * stride;
      stride *= sizes[dim];
    }
    elements = values.vector(last + 1, 2.0f);
    view.data = elements.data();
  }
  // Element number in the contiguous gradient, and value.
  int64_t place(const int64_t (&index)[4]) const { return at(index, {0, 0, 0, 0}, true); }
  float value(const int64_t (&index)[4]) const {
    return elements[static_cast<size_t>(
        at(index, {view.strides[0], view.strides[1], view.strides[2], view.strides[3]}, false))];
  }

 private:
  int64_t at(const int64_t (&index)[4], std::array<int64_t, 4> strides, bool is_contiguous) const {
    int64_t place = 0, stride = 1;
    for (size_t dim = 4; dim-- > 0;) {
      const int64_t i = view.sizes[dim] == 1 ? 0 : index[dim];
      place += i * (is_contiguous ? stride : strides[dim]);
      stride *= view.sizes[dim];
    }
    return place;
  }
};

struct Batch {
  std::vector<int32_t> lengths_q, lengths_k, rows;
  bool has_holes;
};

struct Result {
  std::vector<float> out, lse, dq, dk, dv, dbias;
};

std::vector<int32_t> offsets(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int32_t length : lengths) ends.push_back(ends.back() + length);
  return ends;
}

std::vector<int32_t> coordinates(const Batch& batch, const std::vector<int32_t>& lengths) {
  std::vector<int32_t> coords;
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int32_t token = 0; token < lengths[i]; ++token) {
      coords.push_back(batch.rows[i]);
      coords.push_back(batch.has_holes ? token + token / 3 : token);
    }
  }
  return coords;
}

int64_t largest(const std::vector<int32_t>& coords, size_t part) {
  int32_t found = 0;
  for (size_t i = part; i < coords.size(); i += 2) found = std::max(found, coords[i]);
  return found;
}

// One call with `num_threads` threads, and, with one, everything by the definition.
Result run(const Batch& batch, const Bias& bias, bool causal, uint32_t threshold, int num_threads, bool is_checked) {
  const std::vector<int32_t> cu_q = offsets(batch.lengths_q), cu_k = offsets(batch.lengths_k);
  const std::vector<int32_t> coords_q = coordinates(batch, batch.lengths_q);
  const std::vector<int32_t> coords_k = coordinates(batch, batch.lengths_k);
  const int64_t num_q = cu_q.back(), num_k = cu_k.back();
  Values values(7);
  const std::vector<float> q_values = values.vector(num_q * kToken, 2.0f),
                           k_values = values.vector(num_k * kToken, 2.0f);
  const std::vector<float> v_values = values.vector(num_k * kToken), dout = values.vector(num_q * kToken);
  const DropoutSpec spec{99, 1, threshold, 65536.0f / static_cast<float>(65536 - threshold)};
  Result result;
  const float unset = std::numeric_limits<float>::quiet_NaN();
  result.out.assign(q_values.size(), unset), result.dq.assign(q_values.size(), unset);
  result.dk.assign(k_values.size(), unset), result.dv.assign(k_values.size(), unset);
  result.lse.assign(static_cast<size_t>(kHeads * num_q), unset);
  const int64_t (&sizes)[4] = bias.view.sizes;
  result.dbias.assign(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]), unset);
  const Packed<const float> q{q_values.data(), kToken}, k{k_values.data(), kToken}, v{v_values.data(), kToken};
  const Coords names_q{coords_q.data()}, names_k{coords_k.data()};
  const AttentionShape shape{cu_q.data(),
                             cu_k.data(),
                             static_cast<int64_t>(batch.rows.size()),
                             num_q,
                             num_k,
                             kHeads,
                             kHeadDim,
                             static_cast<float>(kScale),
                             num_q,
                             names_q,
                             names_k,
                             causal,
                             bias.view};
  attention_forward(q, k, v, {result.out.data(), kToken}, result.lse.data(), shape, spec, num_threads);
  const AttentionGradients gradients{
      {result.dq.data(), kToken}, {result.dk.data(), kToken}, {result.dv.data(), kToken}, result.dbias.data()};
  attention_backward({dout.data(), kToken}, q, k, v, result.lse.data(), gradients, shape, spec, num_threads);
  if (!is_checked) return result;

  std::vector<double> dq(q_values.size()), dk(k_values.size()), dv(k_values.size()), dbias(result.dbias.size());
  for (size_t s = 0; s < batch.rows.size(); ++s) {
    for (int64_t i = cu_q[s]; i < cu_q[s + 1]; ++i) {
      for (int64_t h = 0; h < kHeads; ++h) {
        std::vector<double> p(static_cast<size_t>(batch.lengths_k[s])), dp(p.size());
        std::vector<int64_t> places(p.size());
        double sum = 0.0, delta = 0.0;
        for (size_t l = 0; l < p.size(); ++l) {
          const int64_t j = cu_k[s] + static_cast<int64_t>(l);
          const int64_t index[4] = {batch.rows[s], h, names_q.position(i), names_k.position(j)};
          double score = 0.0;
          for (int64_t c = 0; c < kHeadDim; ++c) score += double{q.at(i, h, kHeadDim)[c]} * k.at(j, h, kHeadDim)[c];
          places[l] = bias.place(index);
          const bool is_seen = !causal || names_k.position(j) <= names_q.position(i);
          p[l] = is_seen ? std::exp(kScale * score + double{bias.value(index)}) : 0.0;
          sum += p[l];
        }
        const size_t of_lse = static_cast<size_t>(h * num_q + i);
        if (sum == 0.0) {
          CHECK(result.lse[of_lse] == kMinusInfinity);
        } else {
          CHECK(is_close(result.lse[of_lse], std::log(sum), 2e-6));
        }
        std::vector<double> out(static_cast<size_t>(kHeadDim));
        for (size_t l = 0; l < p.size(); ++l) {
          const int64_t j = cu_k[s] + static_cast<int64_t>(l);
          p[l] = sum == 0.0 ? 0.0 : p[l] / sum;
          const bool keep = kept_probability(spec, names_q.row(i), static_cast<uint32_t>(names_q.position(i)),
                                             static_cast<uint32_t>(h), static_cast<uint32_t>(l));
          const double factor = keep ? spec.scale : 0.0;
          double product = 0.0;
          for (int64_t c = 0; c < kHeadDim; ++c) {
            const double gradient = dout[static_cast<size_t>(i * kToken + h * kHeadDim + c)];
            out[static_cast<size_t>(c)] += p[l] * factor * v.at(j, h, kHeadDim)[c];
            dv[static_cast<size_t>(j * kToken + h * kHeadDim + c)] += p[l] * factor * gradient;
            product += gradient * v.at(j, h, kHeadDim)[c];
          }
          dp[l] = product * factor;
          delta += p[l] * dp[l];
        }
        for (int64_t c = 0; c < kHeadDim; ++c) {
          CHECK(is_close(result.out[static_cast<size_t>(i * kToken + h * kHeadDim + c)], out[static_cast<size_t>(c)],
                         1e-5));
        }
        for (size_t l = 0; l < p.size(); ++l) {
          const int64_t j = cu_k[s] + static_cast<int64_t>(l);
          const double ds = p[l] * (dp[l] - delta);
          dbias[static_cast<size_t>(places[l])] += ds;
          for (int64_t c = 0; c < kHeadDim; ++c) {
            dq[static_cast<size_t>(i * kToken + h * kHeadDim + c)] += kScale * ds * k.at(j, h, kHeadDim)[c];
            dk[static_cast<size_t>(j * kToken + h * kHeadDim + c)] += kScale * ds * q.at(i, h, kHeadDim)[c];
          }
        }
      }
    }
  }
  const auto check = [](const std::vector<float>& actual, const std::vector<double>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) CHECK(is_close(actual[i], expected[i], 2e-5));
  };
  check(result.dq, dq), check(result.dk, dk), check(result.dv, dv), check(result.dbias, dbias);
  return result;
}

const std::vector<Batch>& batches() {
  static const std::vector<Batch> all = {
      {{5, 0, 17, 101}, {5, 0, 17, 101}, {0, 1, 2, 3}, false},
      {{5, 33, 1}, {5, 33, 1}, {2, 0, 1}, true},
      {{7, 4, 0, 1}, {40, 0, 6, 1}, {1, 0, 2, 3}, true},
      {{9, 8, 7}, {9, 8, 7}, {1, 1, 0}, false},  // two sequences of one row
  };
  return all;
}

// Every batch with every choice of broadcast dimensions, each of these with every order of the elements.
void test_bias() {
  const int orders[][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}, {0, 2, 3, 1}};
  for (size_t number = 0; number < batches().size(); ++number) {
    const Batch& batch = batches()[number];
    const std::vector<int32_t> coords_q = coordinates(batch, batch.lengths_q);
    const std::vector<int32_t> coords_k = coordinates(batch, batch.lengths_k);
    const int64_t full[4] = {1 + std::max(largest(coords_q, 0), largest(coords_k, 0)), kHeads, 1 + largest(coords_q, 1),
                             1 + largest(coords_k, 1)};
    for (int letters = 0; letters < 16; ++letters) {
      int64_t sizes[4];
      for (int dim = 0; dim < 4; ++dim) sizes[dim] = letters >> dim & 1 ? full[dim] : 1;
      for (const bool causal : {false, true}) {
        const size_t order = (number + static_cast<size_t>(letters) + causal) % 3;
        Values values(static_cast<uint32_t>(letters));
        Bias bias(values, sizes, orders[order], letters % 3);
        for (size_t i = 0; i < bias.elements.size(); ++i) {
          if (i % 4 == 1 || (i % 32 > 20 && letters & 8)) bias.elements[i] = kMinusInfinity;
        }
        const uint32_t threshold = (static_cast<size_t>(letters) + order + causal) % 2 ? 6554u : 0u;
        const Result one = run(batch, bias, causal, threshold, 1, true);
        const Result three = run(batch, bias, causal, threshold, 3, false);
        CHECK(one.out == three.out && one.lse == three.lse && one.dbias == three.dbias);
        CHECK(one.dq == three.dq && one.dk == three.dk && one.dv == three.dv);
      }
    }
  }
}

// A bias that pushes whole rows so far down that the log of their number of keys is lost beside it.
void test_rows_far_down() {
  constexpr int64_t num_keys = 37, width = 48;
  for (const float far : {-1e9f, -std::numeric_limits<float>::max(), 3e38f}) {
    std::vector<float> scores(width, 0.5f), dp(width), bias(num_keys, far), dbias(num_keys, 1.0f);
    for (size_t i = 0; i < width; ++i) dp[i] = static_cast<float>(i);
    const SoftmaxRow row{num_keys, width, 0.25f, nullptr, 1.0f, bias.data(), dbias.data()};
    std::vector<float> again = scores;
    const float lse = kernels().softmax_forward(scores.data(), row);
    kernels().softmax_backward(again.data(), dp.data(), lse, row);
    for (size_t i = 0; i < width; ++i) {
      const bool is_key = i < num_keys;
      const double p = is_key ? 1.0 / num_keys : 0.0, ds = p * (static_cast<double>(i) - (num_keys - 1) / 2.0);
      CHECK(is_close(scores[i], p, 1e-6) && is_close(again[i], p, 1e-6) && is_close(dp[i], 0.25 * ds, 1e-6));
      if (is_key) CHECK(is_close(dbias[i], 1.0 + ds, 1e-6));
    }
  }
}

// Whether both passes refuse it, before they write.
bool is_refused(const ScoreBias& bias, bool has_coords = true) {
  const std::vector<float> x(5 * 16, 1.0f);
  std::vector<float> y(x.size(), 7.0f), lse(2 * 5, 7.0f), dbias(64, 7.0f);
  const int32_t cu_seqlens[3] = {0, 2, 5};
  const int32_t coords[10] = {0, 0, 0, 1, 1, 0, 1, 1, 1, 2};
  const std::vector<float> before = y, lse_before = lse, dbias_before = dbias;
  const Packed<const float> in{x.data(), 16};
  const Packed<float> out{y.data(), 16};
  const Coords names{has_coords ? coords : nullptr};
  const AttentionShape shape{cu_seqlens, cu_seqlens, 2, 5, 5, 2, 8, 0.25f, 5, names, names, false, bias};
  const DropoutSpec spec{0, 0, 0, 1.0f};
  const bool forward = throws_invalid_argument([&] { attention_forward(in, in, in, out, lse.data(), shape, spec, 1); });
  const bool backward = throws_invalid_argument(
      [&] { attention_backward(in, in, in, in, lse.data(), {out, out, out, dbias.data()}, shape, spec, 1); });
  CHECK(forward == backward && (!forward || (y == before && lse == lse_before && dbias == dbias_before)));
  return forward;
}

void test_refusals() {
  const std::vector<float> elements(2 * 2 * 3 * 3);
  const auto bias = [&](int64_t rows, int64_t heads, int64_t queries, int64_t keys) {
    return ScoreBias{elements.data(), {rows, heads, queries, keys}, {heads * queries * keys, queries * keys, keys, 1}};
  };
  CHECK(!is_refused(bias(2, 2, 3, 3)));
  CHECK(!is_refused(bias(1, 1, 1, 1)));
  CHECK(is_refused(bias(2, 2, 2, 3)));
  CHECK(is_refused(bias(2, 2, 3, 2)));
  CHECK(is_refused(bias(2, 3, 1, 1)));
  CHECK(is_refused(bias(0, 1, 1, 1)));
  CHECK(is_refused(bias(2, 2, 3, 3), false));
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  for_every_level([] {
    test_bias();
    test_rows_far_down();
    test_refusals();
  });
  return 0;
}
