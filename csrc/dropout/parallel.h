// Static splitting of work over threads. Which thread does what never changes a result: every piece of work writes its
// own memory, and sums over rows go through a number of partial sums that does not depend on the number of threads.

#ifndef BERT_FAST_DROPOUT_PARALLEL_H_
#define BERT_FAST_DROPOUT_PARALLEL_H_

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace bert_fast::dropout {

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

// Calls body(thread) once for every thread in [0, num_threads), in parallel. body must not throw.
//
// With OpenMP, PyTorch's own pool of threads is used (its libgomp is the one that is loaded), so no core is
// fought over. Fewer threads than asked for may come; each then does several shares.
template <class Body>
void run_threads(int num_threads, const Body& body) {
  if (num_threads <= 1) {
    body(0);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) body(thread);
#else
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) others.emplace_back([&body, thread] { body(thread); });
  body(0);
  for (std::thread& other : others) other.join();
#endif
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

}  // namespace bert_fast::dropout

#endif  // BERT_FAST_DROPOUT_PARALLEL_H_
