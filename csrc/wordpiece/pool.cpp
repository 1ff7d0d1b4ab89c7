#include "wordpiece/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <new>
#include <thread>

namespace bert_fast::wordpiece {
namespace {

// A thread that waits looks for a while before it sleeps: to wake one takes the caller some 5 microseconds and the
// sleeper some 50, as long as it takes to encode 20 KB. In the first part it keeps its core, then it offers it to
// others.
constexpr std::chrono::microseconds kSpinTime{20};
constexpr std::chrono::microseconds kYieldTime{150};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Waits for a condition, not longer than kYieldTime; returns whether it came true.
template <typename Condition>
bool spin_until(Condition condition) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      pause();
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= kYieldTime) return false;
    if (waited >= kSpinTime) sched_yield();
  }
}

// What one caller wants done; lives on its stack.
struct Job {
  Job(RunUnit run_unit, void* run_context, std::size_t units, std::size_t seats)
      : run(run_unit), context(run_context), num_units(units), free_seats(seats) {}

  const RunUnit run;
  void* const context;
  const std::size_t num_units;
  std::atomic<std::size_t> next_unit{0};
  std::atomic<std::size_t> num_helpers{0};  // at work; changed while the pool is locked
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::size_t free_seats;  // helpers that may still join; guarded by the pool
  std::size_t next_worker = 1;
  Job* next = nullptr;

  bool is_open() const { return free_seats > 0 && next_unit.load(std::memory_order_relaxed) < num_units; }

  void work(std::size_t worker) noexcept {
    try {
      for (std::size_t unit; (unit = next_unit.fetch_add(1, std::memory_order_relaxed)) < num_units;) {
        run(context, unit, worker);
      }
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      next_unit.store(num_units, std::memory_order_relaxed);
    }
  }
};

// Of plain types that are there before any code runs and are never destroyed: threads wait in it until the process
// ends, and a child process starts with a fresh one in the same place, whatever state fork found this one in.
struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;      // there is an open job
  pthread_cond_t finished = PTHREAD_COND_INITIALIZER;  // some job has no helper any more
  Job* jobs = nullptr;                                 // the latest first
  std::size_t num_helpers = 0;
  std::size_t num_spinning = 0;
  std::size_t num_sleeping = 0;
  std::size_t num_waiting = 0;           // callers that sleep
  std::atomic<std::uint64_t> opened{0};  // jobs so far: what spinning threads look at
};

Pool pool;

class Lock {
 public:
  Lock() { pthread_mutex_lock(&pool.mutex); }
  ~Lock() { pthread_mutex_unlock(&pool.mutex); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

Job* find_open_job() {
  Job* job = pool.jobs;
  while (job != nullptr && !job->is_open()) job = job->next;
  return job;
}

// Wakes one sleeper where spinning threads are too few for the seats; it wakes the next one when it joins.
bool needs_sleeper(const Job& job) { return pool.num_sleeping > 0 && job.free_seats > pool.num_spinning; }

// Called locked: does a share of the job unlocked.
void help(Job& job) {
  const std::size_t worker = job.next_worker++;
  --job.free_seats;
  job.num_helpers.fetch_add(1, std::memory_order_relaxed);
  const bool wake_another = needs_sleeper(job);
  pthread_mutex_unlock(&pool.mutex);
  if (wake_another) pthread_cond_signal(&pool.wake);
  job.work(worker);
  pthread_mutex_lock(&pool.mutex);
  // The job may be gone from here on: its caller waits for nothing else.
  const bool was_last = job.num_helpers.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (was_last && pool.num_waiting > 0) pthread_cond_broadcast(&pool.finished);
}

void* run_helper(void*) {
  const Lock locked;
  for (;;) {
    while (Job* job = find_open_job()) help(*job);
    const std::uint64_t seen = pool.opened.load(std::memory_order_relaxed);
    ++pool.num_spinning;
    pthread_mutex_unlock(&pool.mutex);
    spin_until([&] { return pool.opened.load(std::memory_order_relaxed) != seen; });
    pthread_mutex_lock(&pool.mutex);
    --pool.num_spinning;
    while (find_open_job() == nullptr) {
      ++pool.num_sleeping;
      pthread_cond_wait(&pool.wake, &pool.mutex);
      --pool.num_sleeping;
    }
  }
  return nullptr;
}

// Called locked. Signals are for the threads that the program has made itself.
void start_helpers(std::size_t count) {
  if (pool.num_helpers >= count) return;
  sigset_t others, before;
  sigfillset(&others);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&others, fault);
  pthread_sigmask(SIG_SETMASK, &others, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  while (pool.num_helpers < count && pthread_create(&thread, &detached, run_helper, nullptr) == 0) ++pool.num_helpers;
  pthread_attr_destroy(&detached);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void open(Job& job) {
  bool wake_one;
  {
    const Lock locked;
    start_helpers(job.free_seats);
    job.next = pool.jobs;
    pool.jobs = &job;
    pool.opened.fetch_add(1, std::memory_order_relaxed);
    wake_one = needs_sleeper(job);
  }
  if (wake_one) pthread_cond_signal(&pool.wake);
}

// Waits for the helpers that have joined; no other will.
void close(Job& job) {
  const auto is_done = [&] { return job.num_helpers.load(std::memory_order_acquire) == 0; };
  {
    const Lock locked;
    Job** link = &pool.jobs;
    while (*link != &job) link = &(*link)->next;
    *link = job.next;
  }
  if (spin_until(is_done)) return;
  const Lock locked;
  ++pool.num_waiting;
  while (!is_done()) pthread_cond_wait(&pool.finished, &pool.mutex);
  --pool.num_waiting;
}

// Registered when the program or library is loaded, so that no fork can come between it and the first thread.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { new (&pool) Pool; });

}  // namespace

std::size_t available_processors() {
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof(processors), &processors) == 0) {
    return static_cast<std::size_t>(std::max(1, CPU_COUNT(&processors)));
  }
  return std::max(1u, std::thread::hardware_concurrency());  // more processors than a cpu_set_t can tell
}

void run_units(std::size_t num_units, std::size_t num_threads, RunUnit run, void* context) {
  num_threads = std::min({num_threads, num_units, kMaxThreads});
  if (num_threads <= 1) {
    for (std::size_t unit = 0; unit < num_units; ++unit) run(context, unit, 0);
    return;
  }
  Job job(run, context, num_units, num_threads - 1);
  open(job);
  job.work(0);
  close(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace bert_fast::wordpiece
