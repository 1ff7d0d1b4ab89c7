// Threads: every share is done once, and an exception (memory runs out in a worker) reaches the caller.

#include <atomic>
#include <limits>
#include <new>

#include "cpu/attention.h"
#include "cpu/dropout.h"
#include "cpu/layer_norm.h"
#include "cpu/parallel.h"
#include "cpu_check.h"

namespace {

// How many more allocations of C++ objects succeed, in all threads together.
std::atomic<int64_t> allocations_left{std::numeric_limits<int64_t>::max()};

void* allocate(std::size_t size) {
  return allocations_left.fetch_sub(1) <= 0 ? nullptr : std::malloc(size == 0 ? 1 : size);
}

}  // namespace

// Out of line, or GCC sees malloc beside delete and warns.
__attribute__((noinline)) void* operator new(std::size_t size) {
  void* memory = allocate(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocate(size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace bert_fast::cpu::testing {
namespace {

constexpr int kMostThreads = 5;

void test_every_share_is_done_once() {
  for (int num_threads = 1; num_threads <= kMostThreads; ++num_threads) {
    std::atomic<int> calls[kMostThreads] = {};
    run_threads(num_threads, [&](int thread) { ++calls[thread]; });
    for (int thread = 0; thread < kMostThreads; ++thread) CHECK(calls[thread] == (thread < num_threads ? 1 : 0));
    for (const int64_t count : {0, 1, 2, 5, 17}) {
      std::atomic<int> visits[17] = {};
      split_range(count, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (int64_t i = 0; i < 17; ++i) CHECK(visits[i] == (i < count ? 1 : 0));
    }
  }
}

// An exception of our own type, so that nothing else is taken for it.
struct ShareFailed {
  int thread;
};

void test_exceptions_reach_the_caller() {
  for (int num_threads = 1; num_threads <= kMostThreads; ++num_threads) {
    for (int failing = 0; failing < num_threads; ++failing) {
      std::atomic<int> calls{0};
      int caught = -1;
      try {
        run_threads(num_threads, [&](int thread) {
          ++calls;
          if (thread == failing) throw ShareFailed{thread};
        });
      } catch (const ShareFailed& failure) {
        caught = failure.thread;
      }
      CHECK(caught == failing);
      CHECK(calls == num_threads);
    }
    std::atomic<int> calls{0};
    bool caught = false;
    try {
      split_range(kMostThreads, num_threads, [&](int64_t begin, int64_t) {
        ++calls;
        throw ShareFailed{static_cast<int>(begin)};
      });
    } catch (const ShareFailed&) {
      caught = true;
    }
    CHECK(caught && calls == num_threads);
  }
}

// Lets the first, second, .. allocation of `action` and all that follow fail until it succeeds: each time the caller
// must get std::bad_alloc. Returns how often that happened.
template <class Action>
int64_t count_failures(const Action& action) {
  for (int64_t num_allocations = 0;; ++num_allocations) {
    bool failed = false;
    allocations_left = num_allocations;
    try {
      action();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = std::numeric_limits<int64_t>::max();
    if (!failed) return num_allocations;
  }
}

void test_memory_runs_out() {
  // Enough elements for three threads, whose buffers of keep bits are allocated by each.
  constexpr int64_t num_rows = 256, num_cols = 256, head_dim = 64, num_heads = 4;
  constexpr int num_threads = 3;
  CHECK(useful_threads(num_rows * num_cols, num_threads) == num_threads);
  const DropoutSpec spec{1, 2, 6554, 65536.0f / 58982.0f};
  std::vector<int32_t> coords;
  for (int32_t i = 0; i < num_rows; ++i) coords.insert(coords.end(), {0, i});
  Values values(1);
  const std::vector<float> x = values.vector(num_rows * num_cols), columns = values.vector(num_cols);
  std::vector<float> y(x.size()), h(x.size()), mean(num_rows), rstd(num_rows), lse(num_heads * num_rows);
  std::vector<float> dq(x.size()), dk(x.size()), dv(x.size());
  std::vector<float> dx_bias(num_cols), dweight(num_cols), dbias(num_cols);
  std::vector<uint8_t> mask(x.size());

  CHECK(count_failures([&] {
          dropout(y.data(), x.data(), num_rows, num_cols, num_cols, coords.data(), spec, num_threads);
        }) >= num_threads);
  CHECK(count_failures([&] { keep_mask(mask.data(), num_rows, num_cols, coords.data(), spec, num_threads); }) >=
        num_threads);
  const LayerNormForward forward{x.data(), nullptr,     x.data(),    columns.data(), columns.data(), y.data(),
                                 h.data(), mean.data(), rstd.data(), num_rows,       num_cols,       1e-12f};
  CHECK(count_failures([&] { dropout_add_layer_norm_forward(forward, coords.data(), spec, num_threads); }) >=
        num_threads);
  for (const float* bias : {static_cast<const float*>(nullptr), columns.data()}) {
    const LayerNormBackward backward{x.data(),  h.data(),  mean.data(),    rstd.data(),    columns.data(), bias,  //
                                     dq.data(), dk.data(), dx_bias.data(), dweight.data(), dbias.data(),   num_rows,
                                     num_cols};
    CHECK(count_failures([&] { dropout_add_layer_norm_backward(backward, coords.data(), spec, num_threads); }) >=
          num_threads);
  }

  const int32_t cu_seqlens[2] = {0, num_rows};
  const Coords names{coords.data()};
  const AttentionShape shape{cu_seqlens, cu_seqlens, 1,        num_rows, num_rows, num_heads,
                             head_dim,   0.1f,       num_rows, names,    names,    true};
  const Packed<const float> in{x.data(), num_cols};
  CHECK(count_failures([&] {
          attention_forward(in, in, in, {y.data(), num_cols}, lse.data(), shape, spec, num_threads);
        }) >= num_threads);
  CHECK(count_failures([&] {
          attention_backward(in, in, in, in, lse.data(),
                             {{dq.data(), num_cols}, {dk.data(), num_cols}, {dv.data(), num_cols}}, shape, spec,
                             num_threads);
        }) >= num_threads);
}

}  // namespace
}  // namespace bert_fast::cpu::testing

int main() {
  using namespace bert_fast::cpu::testing;
  test_every_share_is_done_once();
  test_exceptions_reach_the_caller();
  test_memory_runs_out();
  return 0;
}
