// The texts of a call in every form in which Python programs hold them, as views that can be read without the GIL.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "bindings/wordpiece_arrow.h"
#include "wordpiece/buffer.h"
#include "wordpiece/utf8.h"

namespace bert_fast::bindings {

namespace py = pybind11;

struct ArrowReader;

// A str or bytes where Python keeps it: nothing is copied, and no UTF-8 copy is left behind in the str. Throws
// py::type_error that names `argument`, with its index if that is not negative.
wordpiece::TextView view_text(PyObject* object, const char* argument, py::ssize_t index = -1);

// Texts and what keeps their memory. Made and destroyed with the GIL held; the views are valid as long as it lives.
//
//     list, tuple, other sequence of str or bytes   the items are held by a tuple of our own
//     NumPy array [n] of dtype U, S, object         views of its items, whatever the strides
//     NumPy array [n] of StringDType                copied in one piece: NumPy may move its strings at any time
//     __arrow_c_array__, __arrow_c_stream__         Arrow C data interface: (large_)utf8, (large_)binary, string and
//                                                   binary views, dictionaries of these
//     (buffer, boundaries)                          text i is buffer[boundaries[i]:boundaries[i + 1]], UTF-8
//
// Memory that is not Python's own (arrays, buffers) must not be written to during the call, and that the buffers of an
// Arrow column are as long as its length and offsets say is its producer's word: the interface tells no sizes.
class Texts {
 public:
  // Throws py::type_error or py::value_error that names the argument and the index.
  explicit Texts(py::handle texts);

  const std::vector<wordpiece::TextView>& views() const { return views_; }
  std::size_t size() const { return views_.size(); }

 private:
  void read_sequence(py::handle texts);
  void read_numpy(py::array array);
  void read_fixed_width(py::array array, bool is_unicode);
  void read_numpy_strings(const py::array& array);
  bool read_arrow(py::handle texts);  // false: no Arrow column
  void read_arrow_array(const ArrowReader& reader, const ArrowArray& array);
  void read_buffer(py::handle buffer, py::handle boundaries);
  void push_utf8(const void* data, std::size_t size) {
    views_.push_back({data, size, wordpiece::TextView::Form::kUtf8});
  }

  std::vector<wordpiece::TextView> views_;
  std::vector<std::shared_ptr<void>> owners_;
  wordpiece::Buffer<char> copied_;
};

}  // namespace bert_fast::bindings
