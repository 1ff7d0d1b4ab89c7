// Relative positions in attention, and the gradients of their tables, against double-precision loops, on exactly sized
// buffers so that a sanitizer sees every access beyond them.

#include <algorithm>
#include <limits>

#include "cpu/attention.h"
#include "cpu_check.h"

namespace bert_fast::cpu::testing {
namespace {

constexpr int64_t kHeads = 2;
constexpr double kScale = 0.25;
constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

struct Batch {
  std::vector<int32_t> lengths_q, lengths_k;
  int32_t start;  // of the first position
  bool has_holes;
};

struct Case {
  Batch batch;
  int64_t head_dim;
  bool has_keys, has_queries;  // tables
  bool is_shared;              // one table for all heads, and room between its rows
  bool causal, has_bias;
  uint32_t threshold;
};

// Which gradients are wanted beside those of q, k and v.
struct Wants {
  bool keys, queries, bias;
};

struct Result {
  std::vector<float> out, lse, dq, dk, dv, dkeys, dqueries, dbias;
};

bool same_bits(const Result& a, const Result& b) {
  return a.out == b.out && a.lse == b.lse && a.dq == b.dq && a.dk == b.dk && a.dv == b.dv;
}

std::vector<int32_t> offsets(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int32_t length : lengths) ends.push_back(ends.back() + length);
  return ends;
}

std::vector<int32_t> coordinates(const Batch& batch, const std::vector<int32_t>& lengths) {
  std::vector<int32_t> coords;
  for (size_t row = 0; row < lengths.size(); ++row) {
    for (int32_t token = 0; token < lengths[row]; ++token) {
      coords.push_back(static_cast<int32_t>(row));
      coords.push_back(batch.start + (batch.has_holes ? token + token / 3 : token));
    }
  }
  return coords;
}

// Inputs of a case, and everything by the definition.
class Expectation {
 public:
  explicit Expectation(const Case& given)
      : case_(given),
        d_(given.head_dim),
        token_(kHeads * d_),
        cu_q_(offsets(given.batch.lengths_q)),
        cu_k_(offsets(given.batch.lengths_k)),
        coords_q_(coordinates(given.batch, given.batch.lengths_q)),
        coords_k_(coordinates(given.batch, given.batch.lengths_k)) {
    num_q_ = cu_q_.back(), num_k_ = cu_k_.back();
    for (const std::vector<int32_t>* coords : {&coords_q_, &coords_k_}) {
      for (size_t i = 1; i < coords->size(); i += 2) positions_ = std::max<int64_t>(positions_, (*coords)[i] + 1);
    }
    num_distances_ = 2 * (positions_ - given.batch.start) - 1;
    Values values(7);
    q_ = values.vector(num_q_ * token_), k_ = values.vector(num_k_ * token_), v_ = values.vector(num_k_ * token_);
    dout_ = values.vector(num_q_ * token_);
    const int64_t row_stride = given.is_shared ? d_ + 3 : token_, size = (num_distances_ - 1) * row_stride;
    for (std::vector<float>* table : {&keys_, &queries_}) {
      *table = values.vector(size + (given.is_shared ? d_ : token_));
    }
    bias_ = values.vector(kHeads * positions_ * positions_);
    const DropoutSpec spec{99, 1, given.threshold, 65536.0f / static_cast<float>(65536 - given.threshold)};
    spec_ = spec;
    shape_ = {cu_q_.data(),
              cu_k_.data(),
              static_cast<int64_t>(given.batch.lengths_q.size()),
              num_q_,
              num_k_,
              kHeads,
              d_,
              static_cast<float>(kScale),
              num_q_,
              Coords{coords_q_.data()},
              Coords{coords_k_.data()},
              given.causal};
    if (given.has_bias) {
      shape_.bias = {bias_.data(), {1, kHeads, positions_, positions_}, {0, positions_ * positions_, positions_, 1}};
    }
    const int64_t head_stride = given.is_shared ? 0 : d_;
    if (given.has_keys) shape_.relative_keys = {keys_.data(), row_stride, head_stride};
    if (given.has_queries) shape_.relative_queries = {queries_.data(), row_stride, head_stride};
    shape_.num_distances = num_distances_;
    compute();
  }

  Result run(const Wants& wants, int num_threads) const {
    Result made;
    made.out.assign(q_.size(), kUnset), made.dq.assign(q_.size(), kUnset);
    made.dk.assign(k_.size(), kUnset), made.dv.assign(k_.size(), kUnset);
    made.lse.assign(static_cast<size_t>(kHeads * num_q_), kUnset);
    if (wants.keys) made.dkeys.assign(static_cast<size_t>(num_distances_ * token_), kUnset);
    if (wants.queries) made.dqueries.assign(static_cast<size_t>(num_distances_ * token_), kUnset);
    if (wants.bias) made.dbias.assign(bias_.size(), kUnset);
    const Packed<const float> q{q_.data(), token_}, k{k_.data(), token_}, v{v_.data(), token_};
    attention_forward(q, k, v, {made.out.data(), token_}, made.lse.data(), shape_, spec_, num_threads);
    const AttentionGradients gradients{{made.dq.data(), token_},
                                       {made.dk.data(), token_},
                                       {made.dv.data(), token_},
                                       wants.bias ? made.dbias.data() : nullptr,
                                       wants.keys ? made.dkeys.data() : nullptr,
                                       wants.queries ? made.dqueries.data() : nullptr};
    attention_backward({dout_.data(), token_}, q, k, v, made.lse.data(), gradients, shape_, spec_, num_threads);
    return made;
  }

  void check(const Result& made) const {
    check_all(made.out, out_, 1e-5), check_all(made.lse, lse_, 2e-6);
    check_all(made.dq, dq_, 2e-5), check_all(made.dk, dk_, 2e-5), check_all(made.dv, dv_, 2e-5);
    if (!made.dkeys.empty()) check_all(made.dkeys, dkeys_, 2e-5);
    if (!made.dqueries.empty()) check_all(made.dqueries, dqueries_, 2e-5);
    if (!made.dbias.empty()) check_all(made.dbias, dbias_, 2e-5);
  }

 private:
  static void check_all(const std::vector<float>& actual, const std::vector<double>& expected, double bound) {
    CHECK(actual.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(actual[i] == expected[i] || is_close(actual[i], expected[i], bound));  // -inf is
    }
  }

  void compute() {
    out_.resize(q_.size()), dq_.resize(q_.size()), dk_.resize(k_.size()), dv_.resize(k_.size());
    dkeys_.resize(static_cast<size_t>(num_distances_ * token_)), dqueries_.resize(dkeys_.size());
    dbias_.resize(bias_.size());
    for (int64_t h = 0; h < kHeads; ++h) {
      for (size_t s = 0; s + 1 < cu_q_.size(); ++s) {
        for (int64_t i = cu_q_[s]; i < cu_q_[s + 1]; ++i) compute_query(h, i, cu_k_[s], cu_k_[s + 1]);
      }
    }
  }

  void compute_query(int64_t h, int64_t i, int64_t first_k, int64_t end_k) {
    const int64_t position_q = shape_.coords_q.position(i);
    const RelativeTable &keys = shape_.relative_keys, &queries = shape_.relative_queries;
    const auto vector_of = [&](const RelativeTable& table, int64_t distance) {
      const int64_t row = distance + (num_distances_ - 1) / 2;
      return table.data == nullptr ? nullptr : table.data + row * table.row_stride + h * table.head_stride;
    };
    const float *q = &q_[place(i, h)], *dout = &dout_[place(i, h)];
    std::vector<double> p, dp;
    double sum = 0.0, delta = 0.0;
    for (int64_t j = first_k; j < end_k; ++j) {
      const int64_t position_k = shape_.coords_k.position(j), distance = position_q - position_k;
      const float *k = &k_[place(j, h)], *c = vector_of(keys, distance), *r = vector_of(queries, distance);
      double score = 0.0;
      for (int64_t e = 0; e < d_; ++e) {
        score += double{q[e]} * k[e] + (c == nullptr ? 0.0 : double{q[e]} * c[e]) +
                 (r == nullptr ? 0.0 : double{k[e]} * r[e]);
      }
      score *= kScale;
      if (case_.has_bias) score += double{bias_[bias_place(h, position_q, position_k)]};
      p.push_back(case_.causal && position_k > position_q ? 0.0 : std::exp(score));
      sum += p.back();
    }
    lse_.push_back(std::log(sum));
    for (int64_t j = first_k; j < end_k; ++j) {
      const size_t l = static_cast<size_t>(j - first_k);
      const bool keep = kept_probability(spec_, shape_.coords_q.row(i), static_cast<uint32_t>(position_q),
                                         static_cast<uint32_t>(h), static_cast<uint32_t>(l));
      const double factor = keep ? spec_.scale : 0.0;
      p[l] = sum == 0.0 ? 0.0 : p[l] / sum;
      double product = 0.0;
      for (int64_t e = 0; e < d_; ++e) {
        out_[place(i, h) + static_cast<size_t>(e)] += p[l] * factor * v_[place(j, h) + static_cast<size_t>(e)];
        dv_[place(j, h) + static_cast<size_t>(e)] += p[l] * factor * dout[e];
        product += double{dout[e]} * v_[place(j, h) + static_cast<size_t>(e)];
      }
      dp.push_back(product * factor);
      delta += p[l] * dp[l];
    }
    for (int64_t j = first_k; j < end_k; ++j) {
      const size_t l = static_cast<size_t>(j - first_k);
      const int64_t position_k = shape_.coords_k.position(j), distance = position_q - position_k;
      const float *k = &k_[place(j, h)], *c = vector_of(keys, distance), *r = vector_of(queries, distance);
      const size_t of_table = place(distance + (num_distances_ - 1) / 2, h);
      dbias_[bias_place(h, position_q, position_k)] += p[l] * (dp[l] - delta);
      const double ds = kScale * p[l] * (dp[l] - delta);
      for (size_t e = 0; e < static_cast<size_t>(d_); ++e) {
        dq_[place(i, h) + e] += ds * (k[e] + (c == nullptr ? 0.0 : double{c[e]}));
        dk_[place(j, h) + e] += ds * (q[e] + (r == nullptr ? 0.0 : double{r[e]}));
        dkeys_[of_table + e] += ds * q[e];
        dqueries_[of_table + e] += ds * k[e];
      }
    }
  }

  size_t place(int64_t row, int64_t head) const { return static_cast<size_t>(row * token_ + head * d_); }
  size_t bias_place(int64_t head, int64_t position_q, int64_t position_k) const {
    return static_cast<size_t>((head * positions_ + position_q) * positions_ + position_k);
  }

  Case case_;
  int64_t d_, token_, num_q_ = 0, num_k_ = 0, positions_ = 1, num_distances_ = 1;
  std::vector<int32_t> cu_q_, cu_k_, coords_q_, coords_k_;
  std::vector<float> q_, k_, v_, dout_, keys_, queries_, bias_;
  DropoutSpec spec_;
  AttentionShape shape_{};
  std::vector<double> out_, lse_, dq_, dk_, dv_, dkeys_, dqueries_, dbias_;
};

void test_case(const Case& given) {
  const Expectation expectation(given);
  for_every_level([&] {
    const Wants all{given.has_keys, given.has_queries, given.has_bias};
    const Result one = expectation.run(all, 1), three = expectation.run(all, 3);
    expectation.check(one);
    CHECK(same_bits(one, three));
    CHECK(one.dkeys == three.dkeys && one.dqueries == three.dqueries && one.dbias == three.dbias);
    for (const Wants& some : {Wants{given.has_keys, false, false}, Wants{false, given.has_queries, false},
                              Wants{false, false, given.has_bias}}) {
      const Result less = expectation.run(some, 2);
      CHECK(same_bits(one, less));
      CHECK(!some.keys || one.dkeys == less.dkeys);
      CHECK(!some.queries || one.dqueries == less.dqueries);
      CHECK(!some.bias || one.dbias == less.dbias);
    }
  });
}

// Any two of the settings meet in each of their combinations.
void test_tables() {
  const std::vector<Batch> batches = {
      {{1, 23, 0, 24, 25}, {1, 23, 0, 24, 25}, 0, false},
      {{30, 17, 5}, {30, 17, 5}, 5, true},
      {{103}, {103}, 0, false},
      {{95, 97}, {95, 97}, 5, false},
      {{40, 7, 3, 5, 4, 0, 33}, {7, 40, 5, 3, 0, 6, 34}, 2, true},  // three at the start have no hole
      {{3, 50, 16}, {60, 1, 16}, 1, false},
  };
  const int64_t head_dims[] = {8, 24, 64, 80};
  for (uint32_t number = 0; number < 24; ++number) {
    const uint32_t batch = number / 4, head_dim = number % 4, which = (batch + head_dim) % 3 + 1;
    const uint32_t bits = number * 0xCD9E8D57u >> 25;
    test_case({batches[batch], head_dims[head_dim], which % 2 == 1, which >= 2, (bits & 1) != 0, (bits & 2) != 0,
               (bits & 4) != 0, (bits & 8) != 0 ? 6554u : 0u});
  }
  // Everything at once.
  test_case({batches[1], 24, true, true, false, true, true, 6554u});
  test_case({batches[3], 64, true, true, true, true, true, 6554u});
}

// The bits of many sequences' sum, which partial sums make.
void test_many_sequences() {
  Batch batch{std::vector<int32_t>(40, 9), std::vector<int32_t>(40, 9), 0, false};
  batch.lengths_q[3] = batch.lengths_k[3] = 31;
  test_case({batch, 24, true, true, false, false, false, 0u});
}

// Whether both passes refuse it, before they write. Tables have `num_distances` rows; positions go up to 2 and 3.
bool is_refused(int64_t num_distances, bool has_coords = true, bool has_tables = true) {
  const std::vector<float> x(5 * 16, 1.0f), table(static_cast<size_t>(std::max<int64_t>(num_distances, 1) * 16), 1.0f);
  std::vector<float> y(x.size(), 7.0f), lse(2 * 5, 7.0f), dtable(table.size(), 7.0f);
  const std::vector<float> before = y, lse_before = lse, dtable_before = dtable;
  const int32_t cu_seqlens[3] = {0, 2, 5}, coords[10] = {0, 0, 0, 1, 1, 4, 1, 5, 1, 7};
  const Packed<const float> in{x.data(), 16};
  const Packed<float> out{y.data(), 16};
  const Coords names{has_coords ? coords : nullptr};
  AttentionShape shape{cu_seqlens, cu_seqlens, 2, 5, 5, 2, 8, 0.25f, 5, names, names, false};
  if (has_tables) shape.relative_keys = shape.relative_queries = {table.data(), 16, 8};
  shape.num_distances = num_distances;
  const DropoutSpec spec{0, 0, 0, 1.0f};
  const bool forward = throws_invalid_argument([&] { attention_forward(in, in, in, out, lse.data(), shape, spec, 1); });
  CHECK(!forward || (y == before && lse == lse_before));
  std::fill(y.begin(), y.end(), 7.0f);
  const AttentionGradients gradients{out, out, out, nullptr, dtable.data(), nullptr};
  const bool backward =
      throws_invalid_argument([&] { attention_backward(in, in, in, in, lse.data(), gradients, shape, spec, 1); });
  CHECK(!backward || (y == before && dtable == dtable_before));
  CHECK(forward == backward || (backward && !has_tables));
  return backward;
}

void test_refusals() {
  CHECK(!is_refused(7));
  CHECK(!is_refused(9));
  CHECK(is_refused(5));  // 4 and 7 are 3 apart
  CHECK(is_refused(8));  // 2M - 1 is odd
  CHECK(is_refused(-1));
  CHECK(is_refused(7, false));
  CHECK(is_refused(7, true, false));  // a gradient of what is not there
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  test_tables();
  test_many_sequences();
  test_refusals();
  return 0;
}
