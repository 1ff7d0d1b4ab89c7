// Functions of libraries that the process has loaded already.

#ifndef BERT_FAST_HOST_LIBRARY_H_
#define BERT_FAST_HOST_LIBRARY_H_

#include <dlfcn.h>

namespace bert_fast::host {

// Finds a function by its name; returns whether the library has it.
template <class F>
bool find_function(void* library, const char* name, F** function) {
  *function = reinterpret_cast<F*>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_LIBRARY_H_
