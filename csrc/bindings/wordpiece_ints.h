// Python ints for token ids, shared by all lists that hold them.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace bert_fast::bindings {

// One int object per id below `count`, made when it is first needed: taking a reference costs 1 to 2 ns, a new int 10
// times that. An object lives as long as the table. Threads may share a table, also without a GIL: of two that make the
// same int at once, one gives its own back. Must be destroyed with the GIL held.
class IntObjects {
 public:
  explicit IntObjects(std::size_t count) : slots_(new std::atomic<PyObject*>[count]()), count_(count) {}
  IntObjects(const IntObjects&) = delete;
  IntObjects& operator=(const IntObjects&) = delete;
  ~IntObjects() {
    for (std::size_t i = 0; i < count_; ++i) Py_XDECREF(slots_[i].load(std::memory_order_acquire));
  }

  // A new reference; nullptr with a Python error if memory is short.
  PyObject* get(std::int32_t id) {
    const auto index = static_cast<std::size_t>(static_cast<std::uint32_t>(id));
    if (index >= count_) return PyLong_FromLong(id);
    PyObject* object = slots_[index].load(std::memory_order_acquire);
    if (object == nullptr && (object = make(index)) == nullptr) return nullptr;
    Py_INCREF(object);
    return object;
  }

  // A new list [first?, ids..., last?]; first and last are borrowed and may be nullptr. nullptr with a Python error.
  PyObject* make_list(const std::int32_t* ids, std::size_t num_ids, PyObject* first, PyObject* last) {
    const Py_ssize_t offset = first != nullptr, num_last = last != nullptr;
    const auto size = static_cast<Py_ssize_t>(num_ids);
    PyObject* list = PyList_New(offset + size + num_last);
    if (list == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < size; ++i) {
      // Taking a reference writes to the object: all of them are more than the first cache holds.
      if (i + kAhead < size) prefetch(ids[i + kAhead]);
      PyObject* item = get(ids[i]);
      if (item == nullptr) {
        Py_DECREF(list);
        return nullptr;
      }
      PyList_SET_ITEM(list, offset + i, item);
    }
    if (first != nullptr) {
      Py_INCREF(first);
      PyList_SET_ITEM(list, 0, first);
    }
    if (last != nullptr) {
      Py_INCREF(last);
      PyList_SET_ITEM(list, offset + size, last);
    }
    return list;
  }

 private:
  static constexpr Py_ssize_t kAhead = 12;

  void prefetch(std::int32_t id) const {
    const auto index = static_cast<std::size_t>(static_cast<std::uint32_t>(id));
    if (index < count_) __builtin_prefetch(slots_[index].load(std::memory_order_relaxed), 1);
  }

  // The object of a slot that was empty (borrowed).
  PyObject* make(std::size_t index) {
    PyObject* made = PyLong_FromSize_t(index);
    PyObject* present = nullptr;
    if (made == nullptr || slots_[index].compare_exchange_strong(present, made, std::memory_order_acq_rel)) return made;
    Py_DECREF(made);
    return present;
  }

  std::unique_ptr<std::atomic<PyObject*>[]> slots_;
  std::size_t count_;
};

}  // namespace bert_fast::bindings
