#include "bindings/wordpiece_inputs.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/wordpiece.h"

namespace bert_fast::bindings {
namespace {

using wordpiece::TextView;

constexpr const char* kExpectedTexts = "a sequence of str or bytes";

template <typename T>
std::shared_ptr<void> keep(T object) {
  return std::make_shared<T>(std::move(object));
}

// A buffer of the buffer protocol, released at the end.
class HeldBuffer {
 public:
  // Messages name `argument`.
  HeldBuffer(const char* argument, py::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) == 0) return;
    const py::error_already_set error;
    const std::string message = std::string(argument) + ": " + std::string(py::str(error.value()));
    if (error.matches(PyExc_TypeError)) throw py::type_error(message);
    throw py::value_error(message);
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ~HeldBuffer() { PyBuffer_Release(&buffer_); }
  const Py_buffer& operator*() const { return buffer_; }
  const Py_buffer* operator->() const { return &buffer_; }

 private:
  Py_buffer buffer_{};
};

template <typename Unit>
std::size_t trimmed_length(const Unit* units, std::size_t length) {
  while (length != 0 && units[length - 1] == 0) --length;
  return length;
}

// The functions of NumPy's C API that read StringDType, by their numbers in its table (fixed since NumPy 2.0); declared
// here so that building needs no NumPy.
struct NumpyStrings {
  struct View {
    std::size_t size;
    const char* data;
  };
  void* (*acquire_allocator)(const void* dtype);
  int (*load)(void* allocator, const void* packed, View* out);  // 0: a string, 1: a missing value, -1: an error
  void (*release_allocator)(void* allocator);

  NumpyStrings() {
    const py::capsule capsule = py::module_::import("numpy._core.multiarray").attr("_ARRAY_API");
    void** table = capsule.get_pointer<void*>();
    acquire_allocator = reinterpret_cast<decltype(acquire_allocator)>(table[316]);
    load = reinterpret_cast<decltype(load)>(table[313]);
    release_allocator = reinterpret_cast<decltype(release_allocator)>(table[318]);
  }
};

bool is_sequence(py::handle object) {
  return !PyUnicode_Check(object.ptr()) && !PyBytes_Check(object.ptr()) && PySequence_Check(object.ptr());
}

// A pair whose second member is an array: no text is one.
bool is_buffer_with_boundaries(py::handle texts) {
  if (!PyTuple_CheckExact(texts.ptr()) || PyTuple_GET_SIZE(texts.ptr()) != 2) return false;
  PyObject* second = PyTuple_GET_ITEM(texts.ptr(), 1);
  return !PyUnicode_Check(second) && !PyBytes_Check(second) && PyObject_CheckBuffer(second);
}

}  // namespace

TextView view_text(PyObject* object, const char* argument, py::ssize_t index) {
  if (PyUnicode_Check(object)) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(object) != 0) throw py::error_already_set();
#endif
    TextView view;
    view.data = PyUnicode_DATA(object);
    view.length = static_cast<std::size_t>(PyUnicode_GET_LENGTH(object));
    switch (PyUnicode_KIND(object)) {
      case PyUnicode_1BYTE_KIND:
        view.form = PyUnicode_IS_ASCII(object) ? TextView::Form::kAscii : TextView::Form::kUcs1;
        break;
      case PyUnicode_2BYTE_KIND:
        view.form = TextView::Form::kUcs2;
        break;
      default:
        view.form = TextView::Form::kUcs4;
    }
    return view;
  }
  if (PyBytes_Check(object)) {
    return {PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)), TextView::Form::kUtf8};
  }
  raise_type(index < 0 ? argument : item_name(argument, index), "str or bytes", object);
}

Texts::Texts(py::handle texts) {
  if (PyList_CheckExact(texts.ptr())) {
    read_sequence(texts);
  } else if (is_buffer_with_boundaries(texts)) {
    read_buffer(py::handle(PyTuple_GET_ITEM(texts.ptr(), 0)), py::handle(PyTuple_GET_ITEM(texts.ptr(), 1)));
  } else if (PyTuple_CheckExact(texts.ptr())) {
    read_sequence(texts);
  } else if (py::isinstance<py::array>(texts)) {
    read_numpy(py::reinterpret_borrow<py::array>(texts));
  } else if (!read_arrow(texts)) {
    read_sequence(texts);
  }
}

void Texts::read_sequence(py::handle texts) {
  if (!is_sequence(texts)) raise_type("texts", kExpectedTexts, texts);
  const py::tuple items = own_items("texts", kExpectedTexts, texts);
  const auto size = static_cast<py::ssize_t>(items.size());
  views_.reserve(items.size());
  for (py::ssize_t i = 0; i < size; ++i) views_.push_back(view_text(PyTuple_GET_ITEM(items.ptr(), i), "texts", i));
  owners_.push_back(keep(items));
}

void Texts::read_numpy(py::array array) {
  const char kind = array.dtype().kind();
  if (array.ndim() != 1) {
    throw py::value_error("texts: expected an array of one dimension, got " + std::to_string(array.ndim()));
  }
  if (kind == 'O') {
    read_sequence(array);
  } else if (kind == 'U' || kind == 'S') {
    read_fixed_width(std::move(array), kind == 'U');
  } else if (kind == 'T') {
    read_numpy_strings(array);
  } else {
    throw py::type_error("texts: expected an array of dtype U, S, object or StringDType, got " +
                         std::string(py::str(array.dtype())));
  }
}

// Items are filled up with NULs, as NumPy reads them: trailing ones do not belong to the text.
void Texts::read_fixed_width(py::array array, bool is_unicode) {
  const bool is_native = !is_unicode || array.dtype().attr("isnative").cast<bool>();
  if (!is_native || (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    array = array.attr("astype")(array.dtype().attr("newbyteorder")("="));
  }
  const auto num_texts = array.shape(0), stride = array.strides(0);
  const auto item_bytes = static_cast<std::size_t>(array.itemsize());
  const char* item = static_cast<const char*>(array.data());
  views_.reserve(static_cast<std::size_t>(num_texts));
  for (py::ssize_t i = 0; i < num_texts; ++i, item += stride) {
    if (!is_unicode) {
      push_utf8(item, trimmed_length(item, item_bytes));
      continue;
    }
    const auto* units = reinterpret_cast<const char32_t*>(item);
    const std::size_t length = trimmed_length(units, item_bytes / 4);
    char32_t largest = 0;  // a str never holds what is no code point, an array may
    for (std::size_t k = 0; k < length; ++k) largest = std::max(largest, units[k]);
    if (largest > 0x10FFFF) {
      throw py::value_error(item_name("texts", i) + ": expected code points up to 1114111, got " +
                            std::to_string(static_cast<std::uint32_t>(largest)));
    }
    views_.push_back({units, length, TextView::Form::kUcs4});
  }
  owners_.push_back(keep(std::move(array)));
}

// Copied while the allocator's lock is held. It could be held for the whole call instead, but not without the GIL:
// threads that have the GIL wait for this lock.
void Texts::read_numpy_strings(const py::array& array) {
  const NumpyStrings api;
  const auto num_texts = array.shape(0), stride = array.strides(0);
  const char* item = static_cast<const char*>(array.data());
  views_.reserve(static_cast<std::size_t>(num_texts));
  const py::dtype dtype = array.dtype();
  const std::unique_ptr<void, void (*)(void*)> allocator(api.acquire_allocator(dtype.ptr()), api.release_allocator);
  for (py::ssize_t i = 0; i < num_texts; ++i, item += stride) {
    NumpyStrings::View view{};
    const int outcome = api.load(allocator.get(), item, &view);
    if (outcome < 0) throw py::error_already_set();
    if (outcome > 0) throw py::type_error(item_name("texts", i) + ": expected a text, got a missing value");
    copied_.append(view.data, view.size);
    push_utf8(nullptr, view.size);
  }
  std::size_t start = 0;
  for (TextView& view : views_) {
    view.data = copied_.data() + start;
    start += view.length;
  }
}

void Texts::read_buffer(py::handle buffer, py::handle boundaries) {
  const auto bytes = std::make_shared<HeldBuffer>("buffer", buffer, PyBUF_ND | PyBUF_FORMAT);
  const HeldBuffer starts("boundaries", boundaries, PyBUF_STRIDED_RO | PyBUF_FORMAT);
  if ((*bytes)->itemsize != 1) {
    throw py::type_error("buffer: expected items of one byte, got " + std::to_string((*bytes)->itemsize));
  }
  std::string format = starts->format == nullptr ? "B" : starts->format;
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) format.erase(0, 1);
  if (starts->itemsize != 8 || (format != "q" && format != "l")) {
    throw py::type_error("boundaries: expected int64, got items of format '" + format + "'");
  }
  if (starts->ndim != 1 || starts->shape[0] == 0) {
    throw py::value_error("boundaries: expected one dimension of at least one entry, got " +
                          (starts->ndim == 1 ? "none" : std::to_string(starts->ndim) + " dimensions"));
  }
  const auto num_texts = starts->shape[0] - 1;
  const char* place = static_cast<const char*>(starts->buf);
  const char* data = static_cast<const char*>((*bytes)->buf);
  std::int64_t previous = 0;
  views_.reserve(static_cast<std::size_t>(num_texts));
  for (py::ssize_t i = 0; i <= num_texts; ++i, place += starts->strides[0]) {
    std::int64_t boundary = 0;
    std::memcpy(&boundary, place, sizeof boundary);
    if (boundary < previous || boundary > (*bytes)->len) {
      throw py::value_error(item_name("boundaries", i) + ": expected an offset from " + std::to_string(previous) +
                            (i == 0 ? "" : " (the one before)") + " to " + std::to_string((*bytes)->len) +
                            " (the size of the buffer), got " + std::to_string(boundary));
    }
    if (i != 0) push_utf8(data + previous, static_cast<std::size_t>(boundary - previous));
    previous = boundary;
  }
  owners_.push_back(bytes);
}

}  // namespace bert_fast::bindings
