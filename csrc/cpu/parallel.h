// Static splitting of work over threads. Which thread does what never changes a result: every piece of work writes its
// own memory, and sums over rows go through a number of partial sums that does not depend on the number of threads.

#ifndef BERT_FAST_CPU_PARALLEL_H_
#define BERT_FAST_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace bert_fast::cpu {

// Below this many elements per thread, starting the thread costs more than it saves.
constexpr int64_t kMinElementsPerThread = 16384;

// How many threads num_elements deserve; num_threads <= 0 asks for as many as the machine (or OpenMP) gives.
inline int useful_threads(int64_t num_elements, int num_threads) {
  if (num_threads <= 0) {
#ifdef _OPENMP
    num_threads = omp_get_max_threads();
#else
    num_threads = static_cast<int>(std::thread::hardware_concurrency());
#endif
  }
  return static_cast<int>(std::clamp<int64_t>(num_elements / kMinElementsPerThread, 1, std::max(num_threads, 1)));
}

// Carries an exception out of threads, which would end the process. Of several, the first to be caught is kept.
class ExceptionCarrier {
 public:
  template <class Body>
  void run(const Body& body, int thread) noexcept {
    try {
      body(thread);
    } catch (...) {
      if (!taken_.exchange(true)) exception_ = std::current_exception();
    }
  }

  // To be called when every thread has finished.
  void rethrow() const {
    if (exception_ != nullptr) std::rethrow_exception(exception_);
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr exception_;
};

// Calls body(thread) once for every thread in [0, num_threads), in parallel. Where body throws (memory runs out), the
// other calls run to their end and one of the exceptions is thrown here.
//
// With OpenMP, PyTorch's own pool of threads is used (its libgomp is the one that is loaded), so no core is
// fought over. Fewer threads than asked for may come; each then does several shares.
template <class Body>
void run_threads(int num_threads, const Body& body) {
  if (num_threads <= 1) {
    body(0);
    return;
  }
  ExceptionCarrier carrier;
#ifdef _OPENMP
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) carrier.run(body, thread);
#else
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_threads - 1));
  int started = 1;
  try {
    for (; started < num_threads; ++started) {
      others.emplace_back([&carrier, &body, thread = started] { carrier.run(body, thread); });
    }
  } catch (const std::exception&) {
    // The system gives no more threads: their shares are done on this one.
  }
  carrier.run(body, 0);
  for (int thread = started; thread < num_threads; ++thread) carrier.run(body, thread);
  for (std::thread& other : others) other.join();
#endif
  carrier.rethrow();
}

// Calls body(begin, end) on contiguous shares of [0, count).
template <class Body>
void split_range(int64_t count, int num_threads, const Body& body) {
  const int64_t shares = std::clamp<int64_t>(count, 1, num_threads);
  run_threads(static_cast<int>(shares), [&](int thread) {
    const int64_t begin = count * thread / shares, end = count * (thread + 1) / shares;
    if (begin < end) body(begin, end);
  });
}

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_PARALLEL_H_
