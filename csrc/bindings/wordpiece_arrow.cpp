// Texts from Arrow columns.

#include "bindings/wordpiece_arrow.h"

#include <algorithm>
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

// The structure that a capsule holds; the capsule keeps what is left of it, so that it is released once.
template <typename Struct>
Struct& from_capsule(py::handle capsule, const char* name) {
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), name);
  if (pointer == nullptr) throw py::error_already_set();
  return *static_cast<Struct*>(pointer);
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
  return {size == 0 ? "" : bytes + start, size, TextView::Form::kUtf8};
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
  const bool is_known = view.size >= 0 && view.buffer >= 0 && view.buffer < num_buffers && view.offset >= 0;
  if (!is_known || view.offset + std::int64_t{view.size} >
                       static_cast<const std::int64_t*>(array.buffers[array.n_buffers - 1])[view.buffer]) {
    throw py::value_error("texts: expected Arrow views into the buffers of the array, got one of " +
                          std::to_string(view.size) + " bytes at " + std::to_string(view.offset) + " of buffer " +
                          std::to_string(view.buffer));
  }
  return {static_cast<const char*>(array.buffers[2 + view.buffer]) + view.offset, size, TextView::Form::kUtf8};
}

using TextAt = TextView (*)(const ArrowArray&, std::int64_t);

TextAt text_reader(const ArrowSchema& schema) {
  const std::string_view format = schema.format;
  if (format == "u" || format == "z") return offset_text<std::int32_t>;
  if (format == "U" || format == "Z") return offset_text<std::int64_t>;
  if (format == "vu" || format == "vz") return view_text_at;
  throw py::type_error("texts: expected an Arrow column of strings or binary values, got one of format '" +
                       std::string(format) + "'");
}

template <typename T>
std::int64_t index_value(const ArrowArray& array, std::int64_t index) {
  return static_cast<std::int64_t>(value_at<T>(array, index));
}

using IndexAt = std::int64_t (*)(const ArrowArray&, std::int64_t);

// Reads the indices of a dictionary-encoded column.
IndexAt index_reader(const ArrowSchema& schema) {
  switch (schema.format[0]) {
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
    default:
      return index_value<std::uint64_t>;
  }
}

}  // namespace

bool Texts::read_arrow(py::handle texts) {
  if (py::hasattr(texts, "__arrow_c_array__")) {
    const py::tuple capsules = texts.attr("__arrow_c_array__")();
    if (capsules.size() != 2) throw py::type_error("texts: expected __arrow_c_array__ to return two capsules");
    Owned<ArrowSchema> schema(from_capsule<ArrowSchema>(capsules[0], "arrow_schema"));
    const auto array = std::make_shared<Owned<ArrowArray>>(from_capsule<ArrowArray>(capsules[1], "arrow_array"));
    owners_.push_back(array);
    read_arrow_array(*schema, **array);
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
  Owned<ArrowArrayStream> stream(from_capsule<ArrowArrayStream>(capsule, "arrow_array_stream"));
  const auto check = [&](int error) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // of a producer written in Python
    if (error == 0) return;
    const char* message = stream->get_last_error(stream.get());
    throw py::value_error("texts: the Arrow stream fails: " +
                          std::string(message == nullptr ? std::strerror(error) : message));
  };
  Owned<ArrowSchema> schema;
  check(stream->get_schema(stream.get(), schema.get()));
  text_reader(schema->dictionary == nullptr ? *schema : *schema->dictionary);  // also where there are no chunks
  for (;;) {
    const auto array = std::make_shared<Owned<ArrowArray>>();
    check(stream->get_next(stream.get(), array->get()));
    if ((*array)->release == nullptr) return true;
    owners_.push_back(array);
    read_arrow_array(*schema, **array);
  }
}

void Texts::read_arrow_array(const ArrowSchema& schema, const ArrowArray& array) {
  const std::size_t num_texts = views_.size() + static_cast<std::size_t>(array.length);
  if (num_texts > views_.capacity()) views_.reserve(std::max(num_texts, 2 * views_.capacity()));
  const bool is_encoded = schema.dictionary != nullptr;
  const TextAt text_at = text_reader(is_encoded ? *schema.dictionary : schema);
  const IndexAt index_at = is_encoded ? index_reader(schema) : nullptr;
  for (std::int64_t i = 0; i < array.length; ++i) {
    if (is_null(array, i)) raise_missing(views_.size());
    if (!is_encoded) {
      views_.push_back(text_at(array, i));
      continue;
    }
    const std::int64_t place = index_at(array, i);
    if (place < 0 || place >= array.dictionary->length) {
      throw py::value_error("texts: expected Arrow indices below " + std::to_string(array.dictionary->length) +
                            ", got " + std::to_string(place));
    }
    if (is_null(*array.dictionary, place)) raise_missing(views_.size());
    views_.push_back(text_at(*array.dictionary, place));
  }
}

}  // namespace bert_fast::bindings
