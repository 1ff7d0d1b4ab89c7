// Python face of the WordPiece core: converts arguments, releases the GIL, hands the results over as NumPy arrays.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wordpiece/batch.h"
#include "wordpiece/tokenizer.h"

namespace py = pybind11;

namespace {

using bert_fast::wordpiece::AddedToken;
using bert_fast::wordpiece::Batch;
using bert_fast::wordpiece::Buffer;
using bert_fast::wordpiece::EncodeOptions;
using bert_fast::wordpiece::TextView;
using bert_fast::wordpiece::Tokenizer;
using bert_fast::wordpiece::TokenizerOptions;

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

std::string item_name(const char* argument, py::ssize_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

[[noreturn]] void raise_type(const std::string& argument, const char* expected, py::handle actual) {
  throw py::type_error(argument + ": expected " + expected + ", got " + type_name(actual));
}

// The items of a sequence, held by a tuple of our own: what another thread does to a list does not matter any more.
py::tuple own_items(const char* argument, const char* expected, py::handle sequence) {
  if (PyUnicode_Check(sequence.ptr()) || PyBytes_Check(sequence.ptr()) || !PySequence_Check(sequence.ptr())) {
    raise_type(argument, expected, sequence);
  }
  PyObject* items = PySequence_Tuple(sequence.ptr());
  if (items == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::tuple>(items);
}

bool read_bool(const std::string& argument, py::handle object) {
  if (!PyBool_Check(object.ptr())) raise_type(argument, "bool", object);
  return object.ptr() == Py_True;
}

// An int from 0 to `limit`.
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

// UTF-8 of a string without lone surrogates; a view that lives as long as the object.
std::string_view read_str(const std::string& argument, py::handle object) {
  if (!PyUnicode_Check(object.ptr())) raise_type(argument, "str", object);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    throw py::value_error(
        argument + ": expected a str without lone surrogates, got " +
        std::string(py::str(py::repr(object).attr("encode")("ascii", "backslashreplace").attr("decode")("ascii"))));
  }
  return {data, static_cast<std::size_t>(size)};
}

std::vector<std::string_view> read_strings(const char* argument, const py::tuple& items) {
  std::vector<std::string_view> strings;
  strings.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    strings.push_back(read_str(item_name(argument, static_cast<py::ssize_t>(i)), items[i]));
  }
  return strings;
}

// A text where Python keeps it: nothing is copied, and no UTF-8 copy is left behind in the str.
TextView view_text(PyObject* object, py::ssize_t index) {
  if (PyUnicode_Check(object)) {
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
  raise_type(item_name("texts", index), "str or bytes", object);
}

// A NumPy array that owns the buffer: no copy.
template <typename T>
py::array_t<T> to_numpy(Buffer<T>&& values, std::vector<py::ssize_t> shape) {
  values.room(1);  // an empty one has memory of its own, too
  const py::capsule owner(values.data(), [](void* p) { std::free(p); });
  return py::array_t<T>(std::move(shape), values.release(), owner);
}

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
    token.content = read_str(name + ".content", fields[0]);
    token.id = static_cast<std::int32_t>(read_size(name + ".id", fields[1], bert_fast::wordpiece::kMaxTokenId));
    token.single_word = read_bool(name + ".single_word", fields[2]);
    token.lstrip = read_bool(name + ".lstrip", fields[3]);
    token.rstrip = read_bool(name + ".rstrip", fields[4]);
    token.normalized = read_bool(name + ".normalized", fields[5]);
    added.push_back(std::move(token));
  }
  return added;
}

// Arguments are taken as they come and checked here, so that messages name them (and do not print a vocabulary).
std::unique_ptr<Tokenizer> make_tokenizer(py::handle vocab, py::handle unk_token, py::handle lowercase,
                                          py::handle strip_accents, py::handle handle_chinese_chars,
                                          py::handle clean_text, py::handle max_word_chars,
                                          py::handle continuing_prefix, py::handle added_tokens,
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
  const py::tuple tokens = own_items("vocab", "a sequence of str", vocab);
  return std::make_unique<Tokenizer>(read_strings("vocab", tokens), std::move(options));
}

py::tuple encode(const Tokenizer& tokenizer, py::handle texts, py::handle want_offsets, py::handle want_word_ids,
                 py::handle max_threads) {
  const bool offsets = read_bool("offsets", want_offsets), word_ids = read_bool("word_ids", want_word_ids);
  const std::size_t num_threads = read_size("num_threads", max_threads, 4096);
  const py::tuple items = own_items("texts", "a sequence of str or bytes", texts);
  std::vector<TextView> views;
  views.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto index = static_cast<py::ssize_t>(i);
    views.push_back(view_text(PyTuple_GET_ITEM(items.ptr(), index), index));
  }
  Batch batch;
  {
    const py::gil_scoped_release released;
    bert_fast::wordpiece::encode_batch(tokenizer, views, {offsets, word_ids}, num_threads, batch);
  }
  const auto num_tokens = static_cast<py::ssize_t>(batch.tokens.ids.size());
  const auto num_offsets = static_cast<py::ssize_t>(batch.cu_seqlens.size());
  py::object offset_array = py::none(), word_id_array = py::none();
  if (offsets) offset_array = to_numpy(std::move(batch.tokens.offsets), {num_tokens, 2});
  if (word_ids) word_id_array = to_numpy(std::move(batch.tokens.word_ids), {num_tokens});
  return py::make_tuple(to_numpy(std::move(batch.tokens.ids), {num_tokens}),
                        to_numpy(std::move(batch.cu_seqlens), {num_offsets}), offset_array, word_id_array);
}

std::string_view single_text(py::handle text, std::string& storage) {
  if (!PyUnicode_Check(text.ptr())) raise_type("text", "str", text);
  return bert_fast::wordpiece::to_utf8(view_text(text.ptr(), 0), storage);
}

py::str normalize(const Tokenizer& tokenizer, py::handle text) {
  std::string storage;
  return tokenizer.normalize(single_text(text, storage));
}

py::list pre_tokenize(const Tokenizer&, py::handle text) {
  std::string storage;
  py::list words;
  for (const Tokenizer::Word& word : Tokenizer::pre_tokenize(single_text(text, storage))) {
    words.append(py::make_tuple(py::str(word.text.data(), word.text.size()), py::make_tuple(word.start, word.stop)));
  }
  return words;
}

}  // namespace

void bind_wordpiece(py::module_& module) {
  py::class_<Tokenizer>(
      module, "WordPiece",
      "WordPiece tokenization of texts; the C++ twin of bert_fast.reference.wordpiece.WordPiece, which "
      "documents arguments and results. Immutable, safe to use from several threads.")
      .def(py::init(&make_tokenizer), py::arg("vocab"), py::kw_only(), py::arg("unk_token") = "[UNK]",
           py::arg("lowercase") = true, py::arg("strip_accents") = py::none(), py::arg("handle_chinese_chars") = true,
           py::arg("clean_text") = true, py::arg("max_word_chars") = 100, py::arg("continuing_prefix") = "##",
           py::arg("added_tokens") = py::tuple(), py::arg("never_split") = py::tuple())
      .def("encode", &encode, py::arg("texts"), py::kw_only(), py::arg("offsets") = false, py::arg("word_ids") = false,
           py::arg("num_threads") = 0,
           "(ids int32 [N], cu_seqlens int64 [n + 1], offsets int32 [N, 2] or None, word_ids int32 [N] or None)")
      .def("normalize", &normalize, py::arg("text"), "The text as BertNormalizer leaves it.")
      .def("pre_tokenize", &pre_tokenize, py::arg("text"), "Words and their (start, stop), as BertPreTokenizer gives.");
}
