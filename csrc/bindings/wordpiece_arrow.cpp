// Texts from Arrow columns.

#include "bindings/wordpiece_arrow.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/wordpiece.h"
#include "bindings/wordpiece_inputs.h"

namespace bert_fast::bindings {
namespace {

using wordpiece::TextView;

[[noreturn]] void raise_missing(std::size_t index) {
  throw py::type_error(item_name("texts", static_cast<py::ssize_t>(index)) + ": expected a text, got null");
}

// Text of a producer for a message: whatever bytes it has, no more than can be read.
std::string shown(const char* text) {
  constexpr std::size_t kMost = 200;
  const std::size_t size = text == nullptr ? 0 : strnlen(text, kMost);
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(size), "replace"));
}

template <typename Struct>
void check_not_released(const Struct& value, const char* kind) {
  if (value.release != nullptr) return;
  throw py::value_error(std::string("texts: expected an Arrow ") + kind +
                        " of its own for every call, got one that is released already");
}

// The structure that a capsule holds, for `Owned`; the capsule keeps what is left of it, so that it is released once.
template <typename Struct>
Struct& from_capsule(py::handle capsule, const char* name, const char* kind) {
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), name);
  if (pointer == nullptr) {
    PyErr_Clear();
    raise_type("texts", (std::string("a capsule '") + name + "' from an Arrow column").c_str(), capsule);
  }
  auto& value = *static_cast<Struct*>(pointer);
  check_not_released(value, kind);
  return value;
}

bool is_null(const ArrowArray& array, std::int64_t index) {
  const auto* bits = static_cast<const std::uint8_t*>(array.buffers[0]);
  if (bits == nullptr || array.null_count == 0) return false;
  const std::int64_t place = array.offset + index;
  return (bits[place / 8] >> (place % 8) & 1) == 0;
}

template <typename T>
T value_at(const ArrowArray& array, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const T*>(array.buffers[1]) + array.offset + index, sizeof value);
  return value;
}

// Value `index` of a column with offsets of type Offset into one buffer of bytes.
template <typename Offset>
TextView offset_text(const ArrowArray& array, std::int64_t index) {
  const auto start = value_at<Offset>(array, index), stop = value_at<Offset>(array, index + 1);
  if (start < 0 || stop < start) {
    throw py::value_error("texts: expected Arrow offsets that do not decrease, got " + std::to_string(start) +
                          " before " + std::to_string(stop));
  }
  const auto size = static_cast<std::size_t>(stop - start);
  const char* bytes = static_cast<const char*>(array.buffers[2]);
  if (size == 0) return {"", 0, TextView::Form::kUtf8};
  if (bytes == nullptr) throw py::value_error("texts: expected an Arrow buffer of text, got a null pointer");
  return {bytes + start, size, TextView::Form::kUtf8};
}

// Value `index` of a column of views: 16 bytes each, the size first; up to 12 bytes of text follow, or the place of
// longer ones in one of several buffers, whose sizes are in the last buffer.
TextView view_text_at(const ArrowArray& array, std::int64_t index) {
  struct View {
    std::int32_t size;
    char prefix[4];
    std::int32_t buffer;
    std::int32_t offset;
  };
  const char* place = static_cast<const char*>(array.buffers[1]) + (array.offset + index) * std::int64_t{sizeof(View)};
  View view;
  std::memcpy(&view, place, sizeof view);
  const auto size = static_cast<std::size_t>(view.size);
  if (view.size >= 0 && view.size <= 12) return {place + 4, size, TextView::Form::kUtf8};
  const std::int64_t num_buffers = array.n_buffers - 3;
  bool is_inside = view.size >= 0 && view.offset >= 0 && view.buffer >= 0 && view.buffer < num_buffers &&
                   array.buffers[2 + view.buffer] != nullptr;
  if (is_inside) {
    std::int64_t available;
    std::memcpy(&available, static_cast<const std::int64_t*>(array.buffers[array.n_buffers - 1]) + view.buffer,
                sizeof available);
    is_inside = view.offset + std::int64_t{view.size} <= available;
  }
  if (!is_inside) {
    throw py::value_error("texts: expected Arrow views into the buffers of the array, got one of " +
                          std::to_string(view.size) + " bytes at " + std::to_string(view.offset) + " of buffer " +
                          std::to_string(view.buffer));
  }
  return {static_cast<const char*>(array.buffers[2 + view.buffer]) + view.offset, size, TextView::Form::kUtf8};
}

// The buffers of an array behind its validity bits.
struct Buffers {
  const char* values;     // what the second one holds
  std::int64_t expected;  // in all
  bool may_be_more;
};
constexpr Buffers kOffsets{"offsets", 3, false}, kViews{"views", 3, true}, kIndices{"indices", 2, false};

struct TextReader {
  TextView (*at)(const ArrowArray&, std::int64_t);
  Buffers buffers;
};

TextReader text_reader(const ArrowSchema& schema) {
  const std::string_view format = schema.format == nullptr ? "" : schema.format;
  if (format == "u" || format == "z") return {offset_text<std::int32_t>, kOffsets};
  if (format == "U" || format == "Z") return {offset_text<std::int64_t>, kOffsets};
  if (format == "vu" || format == "vz") return {view_text_at, kViews};
  throw py::type_error("texts: expected an Arrow column of strings or binary values, got one of format '" +
                       shown(schema.format) + "'");
}

// The schema of the texts: a dictionary's where the column is encoded by one.
const ArrowSchema& text_schema(const ArrowSchema& schema) {
  check_not_released(schema, "schema");
  if (schema.dictionary == nullptr) return schema;
  check_not_released(*schema.dictionary, "schema of a dictionary");
  return *schema.dictionary;
}

template <typename T>
std::int64_t index_value(const ArrowArray& array, std::int64_t index) {
  return static_cast<std::int64_t>(value_at<T>(array, index));
}

using IndexAt = std::int64_t (*)(const ArrowArray&, std::int64_t);

// Reads the indices of a dictionary-encoded column.
IndexAt index_reader(const ArrowSchema& schema) {
  const std::string_view format = schema.format == nullptr ? "" : schema.format;
  switch (format.size() == 1 ? format[0] : '\0') {
    case 'c':
      return index_value<std::int8_t>;
    case 'C':
      return index_value<std::uint8_t>;
    case 's':
      return index_value<std::int16_t>;
    case 'S':
      return index_value<std::uint16_t>;
    case 'i':
      return index_value<std::int32_t>;
    case 'I':
      return index_value<std::uint32_t>;
    case 'l':
      return index_value<std::int64_t>;
    case 'L':
      return index_value<std::uint64_t>;
    default:
      throw py::type_error("texts: expected Arrow indices that are integers, got some of format '" +
                           shown(schema.format) + "'");
  }
}

// What an array must be before a value of it is read: everything but the sizes of its buffers, which the interface does
// not tell. That a buffer holds `offset + length` values, and a buffer of text what the last offset says, is the word
// of the producer.
void check_array(const ArrowArray& array, const Buffers& buffers, bool has_dictionary) {
  constexpr std::int64_t kMost = PTRDIFF_MAX / 64;  // places of values can be counted in bytes
  const auto expect = [&](bool is_so, const char* expected, std::int64_t actual) {
    if (is_so) return;
    throw py::value_error(std::string("texts: expected an Arrow array of ") + buffers.values + " " + expected +
                          ", got " + std::to_string(actual));
  };
  const auto expect_buffer = [&](std::int64_t index, const char* name) {
    if (array.buffers != nullptr && array.buffers[index] != nullptr) return;
    throw py::value_error(std::string("texts: expected an Arrow buffer of ") + name + ", got a null pointer");
  };
  check_not_released(array, "array");
  expect(array.length >= 0 && array.length <= kMost, "of a length from 0 on", array.length);
  expect(array.offset >= 0 && array.offset <= kMost, "that starts at 0 or later", array.offset);
  expect(array.null_count >= -1 && array.null_count <= array.length, "with nulls in its length, or -1",
         array.null_count);
  expect(array.n_children == 0, "without children", array.n_children);
  expect((array.dictionary != nullptr) == has_dictionary, "with a dictionary where its schema has one",
         array.dictionary != nullptr);
  const std::string count =
      "with " + std::to_string(buffers.expected) + " buffers" + (buffers.may_be_more ? " or more" : "");
  const bool is_right = buffers.may_be_more ? array.n_buffers >= buffers.expected : array.n_buffers == buffers.expected;
  expect(is_right, count.c_str(), array.n_buffers);
  if (array.length == 0) return;
  if (array.null_count > 0) expect_buffer(0, "validity bits");
  expect_buffer(1, buffers.values);
  if (array.n_buffers > buffers.expected) expect_buffer(array.n_buffers - 1, "sizes");
}

}  // namespace

// How the values of a column are read, as its schema says.
struct ArrowReader {
  explicit ArrowReader(const ArrowSchema& schema)
      : text(text_reader(text_schema(schema))),
        index_at(schema.dictionary == nullptr ? nullptr : index_reader(schema)) {}

  const TextReader text;
  const IndexAt index_at;  // nullptr: the column is not encoded by a dictionary
};

bool Texts::read_arrow(py::handle texts) {
  if (py::hasattr(texts, "__arrow_c_array__")) {
    const py::object capsules = texts.attr("__arrow_c_array__")();
    if (!PyTuple_Check(capsules.ptr()) || PyTuple_GET_SIZE(capsules.ptr()) != 2) {
      raise_type("texts", "a tuple of two capsules from __arrow_c_array__", capsules);
    }
    const auto capsule = [&](py::ssize_t i) { return py::handle(PyTuple_GET_ITEM(capsules.ptr(), i)); };
    Owned<ArrowSchema> schema(from_capsule<ArrowSchema>(capsule(0), "arrow_schema", "schema"));
    const auto array =
        std::make_shared<Owned<ArrowArray>>(from_capsule<ArrowArray>(capsule(1), "arrow_array", "array"));
    owners_.push_back(array);
    read_arrow_array(ArrowReader(*schema), **array);
    return true;
  }
  if (!py::hasattr(texts, "__arrow_c_stream__")) return false;
  py::object capsule;
  try {
    capsule = texts.attr("__arrow_c_stream__")();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    return false;  // a column of pandas needs pyarrow for this
  }
  Owned<ArrowArrayStream> stream(from_capsule<ArrowArrayStream>(capsule, "arrow_array_stream", "stream"));
  const auto fill = [&](auto function, auto& out) {
    const int error = function == nullptr ? ENOSYS : function(stream.get(), out.get());
    if (error != 0) out->release = nullptr;                          // whatever is there was not handed over
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // of a producer written in Python
    if (error == 0) return;
    const char* message = stream->get_last_error == nullptr ? nullptr : stream->get_last_error(stream.get());
    throw py::value_error("texts: the Arrow stream fails: " +
                          shown(message == nullptr ? std::strerror(error) : message));
  };
  Owned<ArrowSchema> schema;
  fill(stream->get_schema, schema);
  const ArrowReader reader(*schema);
  for (;;) {
    const auto array = std::make_shared<Owned<ArrowArray>>();
    fill(stream->get_next, *array);
    if ((*array)->release == nullptr) return true;
    owners_.push_back(array);
    read_arrow_array(reader, **array);
  }
}

void Texts::read_arrow_array(const ArrowReader& reader, const ArrowArray& array) {
  const bool is_encoded = reader.index_at != nullptr;
  check_array(array, is_encoded ? kIndices : reader.text.buffers, is_encoded);
  if (is_encoded) check_array(*array.dictionary, reader.text.buffers, false);
  const std::size_t num_texts = views_.size() + static_cast<std::size_t>(array.length);
  if (num_texts > views_.capacity()) views_.reserve(std::max(num_texts, 2 * views_.capacity()));
  for (std::int64_t i = 0; i < array.length; ++i) {
    if (is_null(array, i)) raise_missing(views_.size());
    if (!is_encoded) {
      views_.push_back(reader.text.at(array, i));
      continue;
    }
    const std::int64_t place = reader.index_at(array, i);
    if (place < 0 || place >= array.dictionary->length) {
      throw py::value_error("texts: expected Arrow indices below " + std::to_string(array.dictionary->length) +
                            ", got " + std::to_string(place));
    }
    if (is_null(*array.dictionary, place)) raise_missing(views_.size());
    views_.push_back(reader.text.at(*array.dictionary, place));
  }
}

}  // namespace bert_fast::bindings
