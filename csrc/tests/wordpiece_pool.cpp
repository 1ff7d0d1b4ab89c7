// The pool of threads: each unit once, exceptions, many callers, nesting, fork at any moment, exit at any moment.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "wordpiece/pool.h"
#include "wordpiece_check.h"

namespace wp = bert_fast::wordpiece;

#if defined(__SANITIZE_THREAD__)
// Children may start threads: what the pool promises is tested here.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0:atexit_sleep_ms=50"; }
#endif

namespace {

constexpr std::size_t kThreads = 4;  // more than many machines have: then they take turns

// Whether each unit was done once and no worker number was used twice at a time.
bool runs_right(std::size_t num_units, std::size_t num_threads) {
  std::vector<int> done(num_units, 0);
  std::vector<std::atomic<int>> busy(num_threads);
  std::atomic<bool> right{true};
  wp::parallel_for(num_units, num_threads, [&](std::size_t unit, std::size_t worker) {
    if (worker >= num_threads || busy[worker].fetch_add(1) != 0) right = false;
    ++done[unit];
    busy[worker].fetch_sub(1);
  });
  return right && std::all_of(done.begin(), done.end(), [](int times) { return times == 1; });
}

void test_units() {
  for (const std::size_t num_units : {0, 1, 2, 3, 100, 5000}) {
    for (const std::size_t num_threads : {1, 2, 3, 8}) CHECK(runs_right(num_units, num_threads));
  }
  CHECK(runs_right(2000, wp::kMaxThreads + 5));
  std::vector<std::size_t> order;
  wp::parallel_for(5, 1, [&](std::size_t unit, std::size_t worker) { order.push_back(10 * worker + unit); });
  CHECK(order == std::vector<std::size_t>({0, 1, 2, 3, 4}));
  CHECK(wp::available_processors() >= 1);
}

void test_helpers_help() {  // two units that wait for each other need two threads
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> arrived{0};
    wp::parallel_for(2, 2, [&](std::size_t, std::size_t) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
    CHECK(arrived == 2);
    if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // until helpers sleep
  }
}

template <typename Exception>
void check_thrown(std::size_t num_threads, std::size_t failing_unit) {
  std::atomic<std::size_t> calls{0};
  bool caught = false;
  try {
    wp::parallel_for(1000, num_threads, [&](std::size_t unit, std::size_t) {
      ++calls;
      if (unit >= failing_unit) throw Exception();
    });
  } catch (const Exception&) {
    caught = true;
  }
  CHECK(caught);
  CHECK(calls > failing_unit && calls <= failing_unit + num_threads);  // nothing was begun afterwards
  CHECK(runs_right(100, num_threads));
}

struct Failure : std::runtime_error {
  Failure() : std::runtime_error("a failure with a long text, so that it needs memory of its own") {}
};

void test_exceptions() {
  for (const std::size_t num_threads : {1, 2, 4}) {
    for (const std::size_t unit : {0, 1, 500, 999}) {
      check_thrown<std::bad_alloc>(num_threads, unit);
      check_thrown<Failure>(num_threads, unit);
    }
  }
}

void test_many_callers() {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round) {
        if (!runs_right(static_cast<std::size_t>(1 + (caller * 37 + round * 11) % 60), kThreads)) ++wrong;
        try {
          wp::parallel_for(20, kThreads, [&](std::size_t unit, std::size_t) {
            if (unit == static_cast<std::size_t>(round % 20)) throw caller;
          });
          ++wrong;
        } catch (int thrower) {
          if (thrower != caller) ++wrong;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

void test_nesting() {
  std::atomic<int> wrong{0};
  wp::parallel_for(20, kThreads, [&](std::size_t, std::size_t) {
    if (!runs_right(20, kThreads)) ++wrong;
  });
  CHECK(wrong == 0);
}

// Runs `body` in a child process; whether it ended by itself, with status 0, within a minute.
template <typename Body>
bool child_succeeds(Body body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) {
    alarm(60);
    body();
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void run_and_leave() { _exit(runs_right(200, kThreads) && runs_right(3, 2) ? 0 : 1); }

// Tests that fork before this process has threads come first.

void test_fork_before_use() { CHECK(child_succeeds(run_and_leave)); }

void test_exit_while_in_use() {
  for (int round = 0; round < 10; ++round) {
    CHECK(child_succeeds([] {
      std::thread([] {
        for (;;) wp::parallel_for(7, 3, [](std::size_t, std::size_t) {});
      }).detach();
      runs_right(100, kThreads);
      std::exit(0);
    }));
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need much address space themselves
void test_no_threads_to_be_had() {                                   // there is no memory for their stacks
  CHECK(child_succeeds([] {
    std::size_t sum = 0;
    const rlimit none = {1, 1};
    if (setrlimit(RLIMIT_AS, &none) != 0) _exit(1);
    wp::parallel_for(100, kThreads, [&](std::size_t unit, std::size_t worker) { sum += unit + 1000 * worker; });
    _exit(sum == 4950 ? 0 : 1);
  }));
}
#endif

#if !defined(__SANITIZE_THREAD__)  // it takes the threads of the parent for threads of the child
void test_fork() {
  CHECK(runs_right(100, kThreads));
  CHECK(child_succeeds(run_and_leave));
  CHECK(child_succeeds([] {  // a child of a child that has threads
    const bool right = runs_right(100, kThreads);
    _exit(right && child_succeeds(run_and_leave) ? 0 : 1);
  }));
}

void test_fork_while_in_use() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      while (!stop) wp::parallel_for(7, 3, [](std::size_t, std::size_t) {});
    });
  }
  for (int round = 0; round < 40; ++round) CHECK(child_succeeds(run_and_leave));
  stop = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(runs_right(100, kThreads));
}
#endif

}  // namespace

int main() {
  test_fork_before_use();
  test_exit_while_in_use();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  test_no_threads_to_be_had();
#endif
  test_units();
  test_helpers_help();
  test_exceptions();
  test_many_callers();
  test_nesting();
#if !defined(__SANITIZE_THREAD__)
  test_fork();
  test_fork_while_in_use();
#endif
  return wordpiece_test::report("wordpiece_pool");
}
