// One pool of threads per process: started when first needed, kept, shared by all calling threads, new after a fork.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace bert_fast::wordpiece {

// Number of processors that the calling thread may run on; at least 1.
std::size_t available_processors();

// More threads than this never share one piece of work.
constexpr std::size_t kMaxThreads = 256;

// One unit of the work that `context` describes.
using RunUnit = void (*)(void* context, std::size_t unit, std::size_t worker);

void run_units(std::size_t num_units, std::size_t num_threads, RunUnit run, void* context);

// Calls body(unit, worker) once for every unit in [0, num_units), on at most num_threads threads (the calling one among
// them, kMaxThreads in all), and returns when all calls have ended. Units are begun in order, one at a time by each
// thread. `worker` is below num_threads, and no two calls that overlap in time have the same: it numbers memory that
// each thread needs.
//
// Where body throws, units not yet begun are left out and the first exception caught is thrown here. Any number of
// threads may call this at once: each gets the helpers that are free, down to none. Threads that the system does not
// give are done without. Nothing is allocated once the threads are there. A child process made by fork, at whatever
// moment, starts threads of its own. Body must not fork.
template <typename Body>
void parallel_for(std::size_t num_units, std::size_t num_threads, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  const RunUnit run = [](void* context, std::size_t unit, std::size_t worker) {
    (*static_cast<Callable*>(context))(unit, worker);
  };
  run_units(num_units, num_threads, run, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace bert_fast::wordpiece
