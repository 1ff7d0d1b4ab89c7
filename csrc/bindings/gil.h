// Work without the global interpreter lock.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace bert_fast::bindings {

// Gives the GIL up and takes it back at the end of its scope.
//
// A daemon thread may find then that the interpreter has ended. Python before 3.14 ends such a thread by unwinding its
// stack, which no destructor survives (std::terminate); here the thread sleeps until the process is gone, as it does
// since 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding; nothing else comes out of C
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace bert_fast::bindings
