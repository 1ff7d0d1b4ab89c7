// The calls that turn texts into ids: arrays, lists, one list.

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>

#include "bindings/gil.h"
#include "bindings/wordpiece.h"
#include "bindings/wordpiece_inputs.h"
#include "wordpiece/batch.h"
#include "wordpiece/rows.h"

namespace bert_fast::bindings {
namespace {

using wordpiece::Around;
using wordpiece::Batch;
using wordpiece::BatchOptions;
using wordpiece::EncodeOptions;
using wordpiece::RowOptions;
using wordpiece::Rows;
using wordpiece::Scratch;
using wordpiece::TextView;
using wordpiece::Tokens;
using wordpiece::Truncation;

constexpr long long kMaxThreads = 4096;  // the pool has a lower limit of its own

// Below this many bytes the GIL is kept: handing it over and taking it back costs as much as encoding some 100 bytes,
// and far more where other threads want it.
constexpr std::size_t kLongTextBytes = 4096;

// [CLS] and [SEP] from a tuple of two ids, or None.
Around read_around(py::handle object) {
  if (object.is_none()) return {};
  if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 2) {
    raise_type("around", "a tuple of two ints or None", object);
  }
  const auto read_id = [&](py::ssize_t i) {
    const auto id = read_size(item_name("around", i), PyTuple_GET_ITEM(object.ptr(), i), wordpiece::kMaxTokenId);
    return static_cast<std::int32_t>(id);
  };
  return {true, read_id(0), read_id(1)};
}

bool read_is_wide(py::handle dtype) {
  if (PyUnicode_Check(dtype.ptr())) {
    if (PyUnicode_CompareWithASCIIString(dtype.ptr(), "int32") == 0) return false;
    if (PyUnicode_CompareWithASCIIString(dtype.ptr(), "int64") == 0) return true;
  }
  throw py::value_error("dtype: expected 'int32' or 'int64', got " + std::string(py::str(py::repr(dtype))));
}

// None, or a number of tokens.
std::size_t read_max_tokens(py::handle object, const char* argument = "max_tokens") {
  return object.is_none() ? EncodeOptions{}.max_tokens : read_size(argument, object, PY_SSIZE_T_MAX);
}

Batch run_batch(const Engine& engine, const Texts& texts, const BatchOptions& options) {
  Batch batch;
  const WithoutGil released;
  wordpiece::encode_batch(engine.tokenizer, texts.views().data(), texts.size(), options, batch);
  return batch;
}

py::tuple encode(py::handle self, py::handle texts, py::handle offsets, py::handle word_ids, py::handle num_threads,
                 py::handle dtype, py::handle around, py::handle max_tokens) {
  const Engine& engine = engine_of(self);
  BatchOptions options;
  options.encode.offsets = read_bool("offsets", offsets);
  options.encode.word_ids = read_bool("word_ids", word_ids);
  options.encode.max_tokens = read_max_tokens(max_tokens);
  options.around = read_around(around);
  options.wide_ids = read_is_wide(dtype);
  options.num_threads = read_size("num_threads", num_threads, kMaxThreads);
  Batch batch = run_batch(engine, Texts(texts), options);
  const auto num_offsets = static_cast<py::ssize_t>(batch.cu_seqlens.size());
  const auto num_tokens = static_cast<py::ssize_t>(batch.cu_seqlens.back());
  py::object ids, offset_array = py::none(), word_id_array = py::none();
  if (options.wide_ids) {
    ids = to_numpy(std::move(batch.wide_ids), {num_tokens});
  } else {
    ids = to_numpy(std::move(batch.tokens.ids), {num_tokens});
  }
  if (options.encode.offsets) offset_array = to_numpy(std::move(batch.tokens.offsets), {num_tokens, 2});
  if (options.encode.word_ids) word_id_array = to_numpy(std::move(batch.tokens.word_ids), {num_tokens});
  return py::make_tuple(ids, to_numpy(std::move(batch.cu_seqlens), {num_offsets}), offset_array, word_id_array);
}

Truncation read_truncation(py::handle object) {
  if (PyUnicode_Check(object.ptr())) {
    if (PyUnicode_CompareWithASCIIString(object.ptr(), "longest_first") == 0) return Truncation::kLongestFirst;
    if (PyUnicode_CompareWithASCIIString(object.ptr(), "only_first") == 0) return Truncation::kOnlyFirst;
    if (PyUnicode_CompareWithASCIIString(object.ptr(), "only_second") == 0) return Truncation::kOnlySecond;
  }
  throw py::value_error("truncation: expected 'longest_first', 'only_first' or 'only_second', got " +
                        std::string(py::str(py::repr(object))));
}

// A contiguous array of bool, or nullptr for None; `size` receives its length.
const bool* read_has_pair(const py::object& object, std::size_t num_texts, std::size_t& num_rows) {
  num_rows = num_texts;
  if (object.is_none()) return nullptr;
  if (!py::isinstance<py::array_t<bool, py::array::c_style>>(object)) {
    raise_type("has_pair", "a contiguous NumPy array of bool or None", object);
  }
  const auto flags = py::reinterpret_borrow<py::array_t<bool>>(object);
  num_rows = static_cast<std::size_t>(flags.size());
  const bool* has_pair = flags.data();
  const auto num_pairs = static_cast<std::size_t>(std::count(has_pair, has_pair + num_rows, true));
  if (num_rows + num_pairs != num_texts) {
    throw py::value_error("has_pair: expected as many texts as rows and pairs, " +
                          std::to_string(num_rows + num_pairs) + ", got " + std::to_string(num_texts));
  }
  return has_pair;
}

py::object encode_rows(py::handle self, py::handle texts, py::handle around, py::handle pad, const py::object& has_pair,
                       py::handle pad_type, py::handle max_length, py::handle truncation, py::handle truncate_left,
                       py::handle width, py::handle multiple_of, py::handle pad_left, py::handle types, py::handle mask,
                       py::handle num_threads, py::handle pair_separators, py::handle pair_type) {
  const Engine& engine = engine_of(self);
  constexpr long long kMaxWidth = PY_SSIZE_T_MAX / 64;
  RowOptions options;
  const Around specials = read_around(around);
  options.special = specials.on;
  options.cls = specials.cls;
  options.sep = specials.sep;
  options.pad = static_cast<std::int32_t>(read_size("pad", pad, wordpiece::kMaxTokenId));
  options.pad_type = static_cast<std::int32_t>(read_size("pad_type", pad_type, wordpiece::kMaxTokenId));
  options.pair_separators = read_size("pair_separators", pair_separators, 2);
  options.pair_type = static_cast<std::int32_t>(read_size("pair_type", pair_type, 1));
  options.max_length = read_size("max_length", max_length, kMaxWidth);
  options.truncation = read_truncation(truncation);
  options.truncate_left = read_bool("truncate_left", truncate_left);
  options.width = read_size("width", width, kMaxWidth);
  options.multiple_of = read_size("multiple_of", multiple_of, kMaxWidth);
  options.pad_left = read_bool("pad_left", pad_left);
  options.types = read_bool("types", types);
  options.mask = read_bool("mask", mask);
  const std::size_t max_threads = read_size("num_threads", num_threads, kMaxThreads);
  const Texts held(texts);
  std::size_t num_rows = 0;
  const bool* pairs = read_has_pair(has_pair, held.size(), num_rows);
  Rows rows;
  bool is_done = false;
  {
    const WithoutGil released;
    is_done =
        wordpiece::encode_rows(engine.tokenizer, held.views().data(), pairs, num_rows, options, max_threads, rows);
  }
  if (!is_done) return py::none();
  const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(rows.num_rows), static_cast<py::ssize_t>(rows.width)};
  py::object type_array = py::none(), mask_array = py::none();
  if (options.types) type_array = to_numpy(std::move(rows.token_type_ids), shape);
  if (options.mask) mask_array = to_numpy(std::move(rows.attention_mask), shape);
  return py::make_tuple(to_numpy(std::move(rows.input_ids), shape), type_array, mask_array);
}

// --- calls that are too short for pybind11's dispatch (0.2 us and more)
// -----------------------------------------------

// Special tokens around a text as Python has them: the very objects go into the list.
struct AroundObjects {
  PyObject* cls = nullptr;
  PyObject* sep = nullptr;

  explicit AroundObjects(PyObject* object) {
    if (object == nullptr || object == Py_None) return;
    if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 2) {
      cls = PyTuple_GET_ITEM(object, 0);
      sep = PyTuple_GET_ITEM(object, 1);
      if (PyLong_CheckExact(cls) && PyLong_CheckExact(sep)) return;
    }
    raise_type("around", "a tuple of two ints or None", object);
  }
};

void check_num_args(const char* function, Py_ssize_t num_args, Py_ssize_t least, Py_ssize_t most) {
  if (num_args >= least && num_args <= most) return;
  throw py::type_error(std::string(function) + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                       " arguments, got " + std::to_string(num_args));
}

// What pybind11 does around the functions that it binds.
template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* translating(PyObject* self, PyObject* const* args, Py_ssize_t num_args) noexcept {
  try {
    return kFunction(self, args, num_args);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::logic_error& error) {  // length_error, invalid_argument: of the input
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

struct Workspace {
  Scratch scratch;
  Tokens tokens;
};

PyObject* encode_one(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  check_num_args("encode_one", num_args, 1, 3);
  Engine& engine = engine_of(self);
  const TextView text = view_text(args[0], "text");
  const AroundObjects around(num_args >= 2 ? args[1] : nullptr);
  BatchOptions options;
  if (num_args == 3) options.encode.max_tokens = read_max_tokens(args[2]);
  if (text.size_bytes() < kLongTextBytes) {
    thread_local Workspace memory;  // stays small: texts are
    memory.tokens.ids.clear();
    engine.tokenizer.encode(text, options.encode, memory.scratch, memory.tokens);
    return engine.ints.make_list(memory.tokens.ids.data(), memory.tokens.ids.size(), around.cls, around.sep);
  }
  Batch batch;
  {
    const WithoutGil released;  // the caller holds `args` for us
    wordpiece::encode_batch(engine.tokenizer, &text, 1, options, batch);
  }
  return engine.ints.make_list(batch.tokens.ids.data(), batch.tokens.ids.size(), around.cls, around.sep);
}

PyObject* encode_lists(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  check_num_args("encode_lists", num_args, 1, 4);
  Engine& engine = engine_of(self);
  const AroundObjects around(num_args >= 2 ? args[1] : nullptr);
  BatchOptions options;
  if (num_args >= 3) options.encode.max_tokens = read_max_tokens(args[2]);
  if (num_args == 4) options.num_threads = read_size("num_threads", args[3], kMaxThreads);
  const Texts held(args[0]);
  const Batch batch = run_batch(engine, held, options);
  const auto num_texts = static_cast<Py_ssize_t>(held.size());
  py::list lists(num_texts);
  for (Py_ssize_t i = 0; i < num_texts; ++i) {
    const std::int64_t start = batch.cu_seqlens[static_cast<std::size_t>(i)];
    const std::int64_t stop = batch.cu_seqlens[static_cast<std::size_t>(i) + 1];
    PyObject* list = engine.ints.make_list(batch.tokens.ids.data() + start, static_cast<std::size_t>(stop - start),
                                           around.cls, around.sep);
    if (list == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(lists.ptr(), i, list);
  }
  return lists.release().ptr();
}

PyObject* pack(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  check_num_args("pack", num_args, 1, 5);
  const Engine& engine = engine_of(self);
  BatchOptions options;
  options.wide_ids = true;
  if (num_args >= 2) options.around = read_around(args[1]);
  if (num_args >= 3) options.encode.max_tokens = read_max_tokens(args[2]);
  if (num_args >= 4) options.max_batch_tokens = read_max_tokens(args[3], "max_batch_tokens");
  if (num_args == 5) options.num_threads = read_size("num_threads", args[4], kMaxThreads);
  Batch batch = run_batch(engine, Texts(args[0]), options);
  const wordpiece::Buffer<std::int64_t>& ends = batch.cu_seqlens;
  if (ends.back() > std::numeric_limits<std::int32_t>::max()) {
    throw py::value_error("texts: expected fewer than 2^31 tokens, got " + std::to_string(ends.back()));
  }
  wordpiece::Buffer<std::int32_t> cu_seqlens;
  cu_seqlens.reserve(ends.size());
  std::int64_t longest = 0, previous = 0;
  for (const std::int64_t end : ends) {
    cu_seqlens.push_back(static_cast<std::int32_t>(end));
    longest = std::max(longest, end - previous);
    previous = end;
  }
  const auto num_ends = static_cast<py::ssize_t>(ends.size());
  return py::make_tuple(to_numpy(std::move(batch.wide_ids), {static_cast<py::ssize_t>(previous)}),
                        to_numpy(std::move(cu_seqlens), {num_ends}), longest)
      .release()
      .ptr();
}

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
void bind_fast(py::object& cls, const char* name, const char* doc) {
  static PyMethodDef method{name, nullptr, METH_FASTCALL, doc};
  method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&translating<kFunction>));
  PyObject* descriptor = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls.ptr()), &method);
  if (descriptor == nullptr) throw py::error_already_set();
  cls.attr(name) = py::reinterpret_steal<py::object>(descriptor);
}

}  // namespace

// The place of every token in its sequence, of those that start where cu_seqlens says: 0, 1, 2, 0, 1, ...
py::array_t<std::int64_t> sequence_positions(const py::object& cu_seqlens) {
  if (!py::isinstance<py::array_t<std::int32_t, py::array::c_style>>(cu_seqlens)) {
    raise_type("cu_seqlens", "a contiguous NumPy array of int32", cu_seqlens);
  }
  const auto ends = py::reinterpret_borrow<py::array_t<std::int32_t>>(cu_seqlens);
  std::int32_t previous = 0;
  for (py::ssize_t i = 0; i < ends.size(); ++i) {
    const std::int32_t end = ends.data()[i];
    if (end < previous || (i == 0 && end != 0)) {
      throw py::value_error("cu_seqlens: expected offsets from 0 on that do not decrease, got " + std::to_string(end) +
                            " at " + std::to_string(i));
    }
    previous = end;
  }
  wordpiece::Buffer<std::int64_t> positions;
  std::int64_t* to = positions.room(static_cast<std::size_t>(previous));
  for (py::ssize_t i = 1; i < ends.size(); ++i) {
    const std::int64_t length = ends.data()[i] - ends.data()[i - 1];
    for (std::int64_t k = 0; k < length; ++k) to[k] = k;
    to += length;
  }
  positions.commit(static_cast<std::size_t>(previous));
  return to_numpy(std::move(positions), {previous});
}

namespace {

template <typename Class>
void bind_all(Class& engine) {
  engine.def_static("sequence_positions", &sequence_positions, py::arg("cu_seqlens"),
                    "The place of every token in its sequence (int64 [N]), of int32 [n + 1].");
  engine
      .def("encode", &encode, py::arg("texts"), py::kw_only(), py::arg("offsets") = false, py::arg("word_ids") = false,
           py::arg("num_threads") = 0, py::arg("dtype") = "int32", py::arg("around") = py::none(),
           py::arg("max_tokens") = py::none(),
           "(ids [N], cu_seqlens int64 [n + 1], offsets int32 [N, 2] or None, word_ids int32 [N] or None)")
      .def("encode_rows", &encode_rows, py::arg("texts"), py::arg("around"), py::arg("pad"), py::kw_only(),
           py::arg("has_pair") = py::none(), py::arg("pad_type") = 0, py::arg("max_length") = 0,
           py::arg("truncation") = "longest_first", py::arg("truncate_left") = false, py::arg("width") = 0,
           py::arg("multiple_of") = 0, py::arg("pad_left") = false, py::arg("types") = true, py::arg("mask") = true,
           py::arg("num_threads") = 0, py::arg("pair_separators") = 1, py::arg("pair_type") = 1,
           "(input_ids, token_type_ids or None, attention_mask or None), int64 [rows, width]; or None");
  bind_fast<encode_one>(engine, "encode_one",
                        "encode_one($self, text, around=None, max_tokens=None, /)\n--\n\n"
                        "Ids of one text as a list; around=(cls, sep) are put before and behind them.");
  bind_fast<encode_lists>(engine, "encode_lists",
                          "encode_lists($self, texts, around=None, max_tokens=None, num_threads=0, /)\n--\n\n"
                          "Ids of texts as a list for each; around=(cls, sep) are put before and behind them.");
  bind_fast<pack>(engine, "pack",
                  "pack($self, texts, around=None, max_tokens=None, max_batch_tokens=None, num_threads=0, /)\n--\n\n"
                  "(input_ids int64 [N], cu_seqlens int32 [n + 1], max_seqlen) of the first texts that fit.");
}

}  // namespace

void bind_calls(py::class_<Engine>& engine) { bind_all(engine); }
void bind_calls(py::class_<UnigramEngine>& engine) { bind_all(engine); }

}  // namespace bert_fast::bindings
