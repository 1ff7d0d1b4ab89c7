// What the bindings of the WordPiece core share: the engine object, checked reading of arguments, arrays of results.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/wordpiece_ints.h"
#include "wordpiece/added_tokens.h"
#include "wordpiece/buffer.h"
#include "wordpiece/text_tokenizer.h"

namespace bert_fast::bindings {

namespace py = pybind11;

// The object behind `bert_fast._native.WordPiece` and, as UnigramEngine, behind `bert_fast._native.Unigram`.
struct Engine {
  Engine(std::unique_ptr<const wordpiece::TextTokenizer> owned, std::size_t num_ids)
      : owner(std::move(owned)), tokenizer(*owner), ints(num_ids) {}

  const std::unique_ptr<const wordpiece::TextTokenizer> owner;
  const wordpiece::TextTokenizer& tokenizer;
  IntObjects ints;  // for lists
};
struct UnigramEngine : Engine {
  using Engine::Engine;
};

// The engine of an object. Raises TypeError if it is of another class, or made by __new__ alone. To be used in place of
// an argument `Engine&`: for an object without an engine pybind11 passes memory that nothing was written to.
Engine& engine_of(py::handle self);

// --- arguments: taken as they come and checked here, so that messages name them
// ---------------------------------------

// "texts[3]"
std::string item_name(const char* argument, py::ssize_t index);
[[noreturn]] void raise_type(const std::string& argument, const char* expected, py::handle actual);
bool read_bool(const std::string& argument, py::handle object);
// An int from 0 to `limit`.
std::size_t read_size(const std::string& argument, py::handle object, long long limit);
// UTF-8 of a str without lone surrogates; a view that lives as long as the object. Messages name `argument`, with the
// index if that is not negative.
std::string_view read_str(const char* argument, py::handle object, py::ssize_t index = -1);
// The items of a sequence, held by a tuple of our own: what another thread does to a list does not matter any more.
py::tuple own_items(const char* argument, const char* expected, py::handle sequence);

std::vector<std::string_view> read_strings(const char* argument, const py::tuple& items);
std::vector<wordpiece::AddedToken> read_added_tokens(py::handle tokens);
// UTF-8 of one text; `storage` is overwritten where its own bytes do not serve.
std::string_view single_text(py::handle text, std::string& storage);

// --- results
// ----------------------------------------------------------------------------------------------------------

// A NumPy array that owns the buffer: no copy.
template <typename T>
py::array_t<T> to_numpy(wordpiece::Buffer<T>&& values, std::vector<py::ssize_t> shape) {
  values.room(1);  // an empty one has memory of its own, too
  const py::capsule owner(values.data(), [](void* p) { std::free(p); });
  return py::array_t<T>(std::move(shape), values.release(), owner);
}

// Methods that work on one string.
py::str normalize(py::handle self, py::handle text);
py::list pre_tokenize(py::handle self, py::handle text);

// Adds the calls that turn texts into ids.
void bind_calls(py::class_<Engine>& engine);
void bind_calls(py::class_<UnigramEngine>& engine);

}  // namespace bert_fast::bindings
