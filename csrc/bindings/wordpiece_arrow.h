// The Arrow C data interface: structures by which libraries hand columns over without a copy. Layout and field names
// are fixed by its specification (Apache Arrow, "The Arrow C data interface" and "... stream interface").
#pragma once

#include <cstddef>
#include <cstdint>

namespace bert_fast::bindings {

struct ArrowSchema {
  const char* format;  // "u" is utf8, "U" large_utf8, ...
  const char* name;
  const char* metadata;
  std::int64_t flags;
  std::int64_t n_children;
  ArrowSchema** children;
  ArrowSchema* dictionary;
  void (*release)(ArrowSchema*);  // nullptr: released, or moved away; what it points to may be gone
  void* private_data;
};

struct ArrowArray {
  std::int64_t length;
  std::int64_t null_count;  // -1: not counted
  std::int64_t offset;      // of the first value in the buffers
  std::int64_t n_buffers;
  std::int64_t n_children;
  const void** buffers;
  ArrowArray** children;
  ArrowArray* dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

struct ArrowArrayStream {
  int (*get_schema)(ArrowArrayStream*, ArrowSchema* out);  // 0, or an errno
  int (*get_next)(ArrowArrayStream*, ArrowArray* out);     // a released array marks the end
  const char* (*get_last_error)(ArrowArrayStream*);
  void (*release)(ArrowArrayStream*);
  void* private_data;
};

// A structure taken over from where a producer put it, released at the end.
template <typename Struct>
class Owned {
 public:
  Owned() : value_() {}
  explicit Owned(Struct& from) : value_(from) { from.release = nullptr; }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (value_.release != nullptr) value_.release(&value_);
  }
  Struct* get() { return &value_; }
  Struct& operator*() { return value_; }
  Struct* operator->() { return &value_; }

 private:
  Struct value_;
};

}  // namespace bert_fast::bindings
