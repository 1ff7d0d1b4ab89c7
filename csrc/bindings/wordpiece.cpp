// The class bert_fast._native.WordPiece: construction, and what works on one string.

#include "bindings/wordpiece.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "bindings/gil.h"
#include "bindings/wordpiece_inputs.h"
#include "wordpiece/tokenizer.h"
#include "wordpiece/utf8.h"

namespace bert_fast::bindings {

using wordpiece::AddedToken;
using wordpiece::Tokenizer;
using wordpiece::TokenizerOptions;

std::string item_name(const char* argument, py::ssize_t index) {
  return index < 0 ? argument : std::string(argument) + "[" + std::to_string(index) + "]";
}

Engine& engine_of(py::handle self) {
  // Looking types up costs 100 instructions.
  static PyObject* const wordpiece_type = py::type::of<Engine>().release().ptr();
  static PyObject* const unigram_type = py::type::of<UnigramEngine>().release().ptr();
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(self.ptr()));
  if (type != wordpiece_type && type != unigram_type) raise_type("self", "WordPiece or Unigram", self);
  // The classes are final, so there are no others, and instances have pybind11's simple layout.
  void* const value = reinterpret_cast<py::detail::instance*>(self.ptr())->simple_value_holder[0];
  if (value == nullptr) {
    throw py::type_error((type == unigram_type ? "Unigram" : "WordPiece") + std::string(": __init__() was not called"));
  }
  return type == unigram_type ? *static_cast<UnigramEngine*>(value) : *static_cast<Engine*>(value);
}

void raise_type(const std::string& argument, const char* expected, py::handle actual) {
  const std::string type = py::str(py::type::handle_of(actual).attr("__name__"));
  throw py::type_error(argument + ": expected " + expected + ", got " + type);
}

bool read_bool(const std::string& argument, py::handle object) {
  if (!PyBool_Check(object.ptr())) raise_type(argument, "bool", object);
  return object.ptr() == Py_True;
}

std::size_t read_size(const std::string& argument, py::handle object, long long limit) {
  if (!PyLong_Check(object.ptr()) || PyBool_Check(object.ptr())) raise_type(argument, "int", object);
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow != 0 || value < 0 || value > limit) {
    throw py::value_error(argument + ": expected an int from 0 to " + std::to_string(limit) + ", got " +
                          std::string(py::str(object)));
  }
  return static_cast<std::size_t>(value);
}

std::string_view read_str(const char* argument, py::handle object, py::ssize_t index) {
  if (!PyUnicode_Check(object.ptr())) raise_type(item_name(argument, index), "str", object);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    throw py::value_error(
        item_name(argument, index) + ": expected a str without lone surrogates, got " +
        std::string(py::str(py::repr(object).attr("encode")("ascii", "backslashreplace").attr("decode")("ascii"))));
  }
  return {data, static_cast<std::size_t>(size)};
}

py::tuple own_items(const char* argument, const char* expected, py::handle sequence) {
  if (PyUnicode_Check(sequence.ptr()) || PyBytes_Check(sequence.ptr()) || !PySequence_Check(sequence.ptr())) {
    raise_type(argument, expected, sequence);
  }
  PyObject* items = PySequence_Tuple(sequence.ptr());
  if (items == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::tuple>(items);
}

std::vector<std::string_view> read_strings(const char* argument, const py::tuple& items) {
  std::vector<std::string_view> strings;
  strings.reserve(items.size());
  const auto size = static_cast<py::ssize_t>(items.size());
  for (py::ssize_t i = 0; i < size; ++i) {
    strings.push_back(read_str(argument, PyTuple_GET_ITEM(items.ptr(), i), i));
  }
  return strings;
}

namespace {

// The lines of a vocab.txt, as bert_fast.tokenization.vocab reads them: they end with LF or CR LF and with nothing
// else, and what follows the last LF is a line if it is not empty.
std::vector<std::string_view> split_lines(std::string_view bytes) {
  if (const std::size_t valid = wordpiece::valid_utf8_prefix(bytes); valid != bytes.size()) {
    throw py::value_error("vocab: expected UTF-8, got an invalid byte at " + std::to_string(valid));
  }
  std::vector<std::string_view> lines;
  lines.reserve(static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), '\n')) + 1);
  for (std::size_t start = 0; start < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\n', start), bytes.size());
    std::string_view line = bytes.substr(start, end - start);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    lines.push_back(line);
    start = end + 1;
  }
  return lines;
}

}  // namespace

std::vector<AddedToken> read_added_tokens(py::handle tokens) {
  constexpr const char* kExpected = "a tuple (content, id, single_word, lstrip, rstrip, normalized)";
  std::vector<AddedToken> added;
  const py::tuple items = own_items("added_tokens", "a sequence of tuples", tokens);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::string name = item_name("added_tokens", static_cast<py::ssize_t>(i));
    if (!PyTuple_Check(items[i].ptr()) && !PyList_Check(items[i].ptr())) raise_type(name, kExpected, items[i]);
    const py::tuple fields = own_items(name.c_str(), kExpected, items[i]);
    if (fields.size() != 6) {
      throw py::value_error(name + ": expected " + kExpected + ", got " + std::to_string(fields.size()) + " fields");
    }
    AddedToken token;
    token.content = read_str((name + ".content").c_str(), fields[0]);
    token.id = static_cast<std::int32_t>(read_size(name + ".id", fields[1], wordpiece::kMaxTokenId));
    token.single_word = read_bool(name + ".single_word", fields[2]);
    token.lstrip = read_bool(name + ".lstrip", fields[3]);
    token.rstrip = read_bool(name + ".rstrip", fields[4]);
    token.normalized = read_bool(name + ".normalized", fields[5]);
    added.push_back(std::move(token));
  }
  return added;
}

namespace {

// Arguments are taken as they come and checked here, so that messages name them (and do not print a vocabulary).
std::unique_ptr<Engine> make_engine(py::handle vocab, py::handle unk_token, py::handle lowercase,
                                    py::handle strip_accents, py::handle handle_chinese_chars, py::handle clean_text,
                                    py::handle max_word_chars, py::handle continuing_prefix, py::handle added_tokens,
                                    py::handle never_split) {
  TokenizerOptions options;
  options.normalizer.clean_text = read_bool("clean_text", clean_text);
  options.normalizer.handle_chinese_chars = read_bool("handle_chinese_chars", handle_chinese_chars);
  options.normalizer.lowercase = read_bool("lowercase", lowercase);
  options.normalizer.strip_accents =
      strip_accents.is_none() ? options.normalizer.lowercase : read_bool("strip_accents", strip_accents);
  options.unk_token = read_str("unk_token", unk_token);
  options.continuing_prefix = read_str("continuing_prefix", continuing_prefix);
  options.max_word_chars = read_size("max_word_chars", max_word_chars, std::numeric_limits<std::int32_t>::max());
  options.added_tokens = read_added_tokens(added_tokens);
  const py::tuple kept_words = own_items("never_split", "a sequence of str", never_split);
  for (const std::string_view word : read_strings("never_split", kept_words)) options.never_split.emplace_back(word);
  py::object owner;
  std::vector<std::string_view> tokens;
  if (PyBytes_Check(vocab.ptr())) {
    owner = py::reinterpret_borrow<py::object>(vocab);
    tokens = split_lines({PyBytes_AS_STRING(vocab.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(vocab.ptr()))});
  } else {
    owner = own_items("vocab", "a sequence of str", vocab);
    tokens = read_strings("vocab", py::reinterpret_borrow<py::tuple>(owner));
  }
  // Ids of added tokens may be far apart: those beyond this many get a new int each time.
  const std::size_t num_shared_ints = tokens.size() + 4096;
  const WithoutGil released;
  return std::make_unique<Engine>(std::make_unique<Tokenizer>(tokens, std::move(options)), num_shared_ints);
}

}  // namespace

std::string_view single_text(py::handle text, std::string& storage) {
  if (!PyUnicode_Check(text.ptr())) raise_type("text", "str", text);
  return wordpiece::to_utf8(view_text(text.ptr(), "text"), storage);
}

py::str normalize(py::handle self, py::handle text) {
  std::string storage;
  return engine_of(self).tokenizer.normalize(single_text(text, storage));
}

py::list pre_tokenize(py::handle self, py::handle text) {
  const Engine& engine = engine_of(self);
  std::string storage;
  py::list words;
  for (const wordpiece::TextTokenizer::Word& word : engine.tokenizer.split_words(single_text(text, storage))) {
    words.append(py::make_tuple(py::str(word.text.data(), word.text.size()), py::make_tuple(word.start, word.stop)));
  }
  return words;
}

}  // namespace bert_fast::bindings

void bind_wordpiece(pybind11::module_& module) {
  namespace py = pybind11;
  using namespace bert_fast::bindings;
  py::class_<Engine> engine(
      module, "WordPiece", py::is_final(),
      "WordPiece tokenization of texts; the C++ twin of bert_fast.reference.wordpiece.WordPiece, which "
      "documents arguments and results. Immutable, safe to use from several threads.");
  engine
      .def(py::init(&make_engine), py::arg("vocab"), py::kw_only(), py::arg("unk_token") = "[UNK]",
           py::arg("lowercase") = true, py::arg("strip_accents") = py::none(), py::arg("handle_chinese_chars") = true,
           py::arg("clean_text") = true, py::arg("max_word_chars") = 100, py::arg("continuing_prefix") = "##",
           py::arg("added_tokens") = py::tuple(), py::arg("never_split") = py::tuple())
      .def("normalize", &normalize, py::arg("text"), "The text as BertNormalizer leaves it.")
      .def("pre_tokenize", &pre_tokenize, py::arg("text"), "Words and their (start, stop), as BertPreTokenizer gives.");
  // Without it, the oldest protocols of pickle would make an object of pybind11's base class, which ends the process.
  engine.def("__reduce_ex__",
             [](py::handle, py::handle) -> py::object { throw py::type_error("cannot pickle or copy a WordPiece"); });
  bind_calls(engine);
}
