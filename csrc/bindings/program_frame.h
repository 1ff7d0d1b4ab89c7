// What belongs to one run of a program, on its stack, and what its steps share.

#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/program.h"

namespace bert_fast::bindings {

// The memory of one run: values of numbers, addresses and tensors of slots.
class Frame {
 public:
  explicit Frame(const Body& body) : num_slots_(static_cast<size_t>(body.num_slots)) {
    const size_t num_words = body.expressions.size() + 2 * num_slots_;
    uint64_t* words = small_;
    if (num_words > kSmall) words = large_ = new uint64_t[num_words];
    slots = reinterpret_cast<PyObject**>(words);
    addresses = words + num_slots_;
    values = reinterpret_cast<int64_t*>(words + 2 * num_slots_);
    std::memset(words, 0, 2 * num_slots_ * sizeof(uint64_t));
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  ~Frame() {
    for (size_t i = 0; i < num_slots_; i++) Py_XDECREF(slots[i]);
    delete[] large_;
  }

  void put(int32_t slot, PyObject* owned) {
    PyObject* before = slots[slot];
    slots[slot] = owned;
    addresses[slot] = 0;
    Py_XDECREF(before);
  }

  PyObject** slots;     // owned; null: empty
  uint64_t* addresses;  // 0: not asked yet
  int64_t* values;

 private:
  static constexpr size_t kSmall = 1024;
  size_t num_slots_;
  uint64_t* large_ = nullptr;
  uint64_t small_[kSmall];
};

class Ref {
 public:
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

inline bool is_tensor(const Body& body, PyObject* object) { return PyObject_TypeCheck(object, body.tensor_type) != 0; }

// Asks for the address of a slot's tensor where it is not known; false with an exception.
bool find_address(const Body& body, Frame& frame, int32_t slot);

// A tuple of these numbers, or null with an exception.
PyObject* tuple_of(const std::vector<int32_t>& numbers, const int64_t* values);

// Fills slots of scratch from the last run if that had the same sizes. Returns whether this run is to keep its scratch.
bool take_kept(Body& body, void* stream, Frame& frame);

// Keeps the scratch of a run that is done for the next one.
void keep_scratch(Body& body, Frame& frame);

// Whether cuBLASLt makes a product of this run. Memory that the run has not allocated yet counts as aligned.
bool can_multiply(const Body& body, const ProductStep& step, const Frame& frame);

// Puts a product into the stream; false with an exception.
bool run_product(const Body& body, const ProductStep& step, void* stream, Frame& frame);

// Puts a kernel into the stream; false with an exception.
bool run_launch(const Body& body, LaunchStep& step, void* stream, Frame& frame);

}  // namespace bert_fast::bindings
