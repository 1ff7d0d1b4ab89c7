// The class bert_fast._native.Unigram: its construction. All else is what WordPiece has.

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/gil.h"
#include "bindings/wordpiece.h"
#include "unigram/tokenizer.h"

namespace bert_fast::bindings {
namespace {

using unigram::NormalizerStep;
using unigram::Prepend;
using unigram::Tokenizer;
using unigram::TokenizerOptions;

std::vector<double> read_scores(py::handle object) {
  const py::tuple items = own_items("scores", "a sequence of numbers", object);
  std::vector<double> scores;
  scores.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const double score = PyFloat_AsDouble(items[i].ptr());
    if (score == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_type(item_name("scores", static_cast<py::ssize_t>(i)), "float", items[i]);
    }
    scores.push_back(score);
  }
  return scores;
}

std::string read_bytes(const char* argument, py::handle object) {
  if (!PyBytes_Check(object.ptr())) raise_type(argument, "bytes", object);
  return {PyBytes_AS_STRING(object.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
}

// ("charsmap",), ("strip", left, right), ("replace", pattern, content), ("replace_spaces", least, content),
// ("replace_whitespace", content), ("lowercase",), ("compose",).
std::vector<NormalizerStep> read_steps(py::handle object) {
  std::vector<NormalizerStep> steps;
  const py::tuple items = own_items("normalizer", "a sequence of tuples", object);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::string name = item_name("normalizer", static_cast<py::ssize_t>(i));
    if (!PyTuple_Check(items[i].ptr())) raise_type(name, "tuple", items[i]);
    const auto fields = py::reinterpret_borrow<py::tuple>(items[i]);
    const std::string_view kind = fields.empty() ? std::string_view() : read_str((name + "[0]").c_str(), fields[0]);
    NormalizerStep step;
    if (kind == "charsmap" && fields.size() == 1) {
      step.kind = NormalizerStep::Kind::kCharsmap;
    } else if (kind == "strip" && fields.size() == 3) {
      step.kind = NormalizerStep::Kind::kStrip;
      step.left = read_bool(name + "[1]", fields[1]);
      step.right = read_bool(name + "[2]", fields[2]);
    } else if (kind == "replace" && fields.size() == 3) {
      step.kind = NormalizerStep::Kind::kReplaceText;
      step.pattern = read_str((name + "[1]").c_str(), fields[1]);
      step.content = read_str((name + "[2]").c_str(), fields[2]);
      if (step.pattern.empty()) throw py::value_error(name + "[1]: expected a pattern, got an empty str");
    } else if (kind == "replace_spaces" && fields.size() == 3) {
      step.kind = NormalizerStep::Kind::kReplaceSpaces;
      step.least = read_size(name + "[1]", fields[1], 1000);
      step.content = read_str((name + "[2]").c_str(), fields[2]);
      if (step.least == 0) throw py::value_error(name + "[1]: expected at least 1, got 0");
    } else if (kind == "replace_whitespace" && fields.size() == 2) {
      step.kind = NormalizerStep::Kind::kReplaceWhitespace;
      step.content = read_str((name + "[1]").c_str(), fields[1]);
    } else if (kind == "lowercase" && fields.size() == 1) {
      step.kind = NormalizerStep::Kind::kLowercase;
    } else if (kind == "compose" && fields.size() == 1) {
      step.kind = NormalizerStep::Kind::kCompose;
    } else {
      throw py::value_error(name + ": there is no step '" + std::string(kind) + "' of " +
                            std::to_string(fields.size()) + " fields");
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

Prepend read_prepend(py::handle object) {
  const std::string_view name = read_str("prepend", object);
  if (name == "always") return Prepend::kAlways;
  if (name == "first") return Prepend::kFirst;
  if (name == "never") return Prepend::kNever;
  throw py::value_error("prepend: expected 'always', 'first' or 'never', got '" + std::string(name) + "'");
}

std::unique_ptr<UnigramEngine> make_engine(py::handle vocab, py::handle scores, py::handle unk_id,
                                           py::handle byte_fallback, py::handle charsmap, py::handle normalizer,
                                           py::handle whitespace_split, py::handle split_punctuation,
                                           py::handle replacement, py::handle prepend, py::handle split,
                                           py::handle added_tokens, py::handle whole_texts) {
  const py::tuple items = own_items("vocab", "a sequence of str", vocab);
  const std::vector<std::string_view> tokens = read_strings("vocab", items);
  TokenizerOptions options;
  options.model.unk_id = static_cast<std::int32_t>(read_size("unk_id", unk_id, wordpiece::kMaxTokenId));
  options.model.byte_fallback = read_bool("byte_fallback", byte_fallback);
  options.charsmap = read_bytes("charsmap", charsmap);
  options.steps = read_steps(normalizer);
  options.whitespace_split = read_bool("whitespace_split", whitespace_split);
  options.split_punctuation = read_bool("split_punctuation", split_punctuation);
  if (options.whitespace_split && options.split_punctuation) {
    throw py::value_error("split_punctuation: expected False with whitespace_split, got True");
  }
  const std::string_view mark = read_str("replacement", replacement);
  if (mark.empty() || mark.size() != wordpiece::utf8_length(static_cast<unsigned char>(mark[0]))) {
    throw py::value_error("replacement: expected one character, got '" + std::string(mark) + "'");
  }
  const char* p = mark.data();
  options.replacement = wordpiece::decode_utf8(p);
  options.prepend = read_prepend(prepend);
  options.split = read_bool("split", split);
  options.added_tokens = read_added_tokens(added_tokens);
  options.whole_texts = read_bool("whole_texts", whole_texts);
  const std::vector<double> numbers = read_scores(scores);
  const WithoutGil released;
  return std::make_unique<UnigramEngine>(std::make_unique<Tokenizer>(tokens, numbers, std::move(options)),
                                         tokens.size() + 4096);
}

}  // namespace
}  // namespace bert_fast::bindings

void bind_unigram(pybind11::module_& module) {
  namespace py = pybind11;
  using namespace bert_fast::bindings;
  py::class_<UnigramEngine> engine(
      module, "Unigram", py::is_final(),
      "Unigram (SentencePiece) tokenization of texts, with the calls of WordPiece. Immutable, safe to use from several "
      "threads.");
  engine
      .def(py::init(&make_engine), py::arg("vocab"), py::kw_only(), py::arg("scores"), py::arg("unk_id"),
           py::arg("byte_fallback") = false, py::arg("charsmap") = py::bytes(), py::arg("normalizer") = py::tuple(),
           py::arg("whitespace_split") = true, py::arg("split_punctuation") = false,
           py::arg("replacement") = "\xE2\x96\x81", py::arg("prepend") = "always", py::arg("split") = true,
           py::arg("added_tokens") = py::tuple(), py::arg("whole_texts") = false)
      .def("normalize", &normalize, py::arg("text"), "The text as the vocabulary is matched against it.")
      .def("pre_tokenize", &pre_tokenize, py::arg("text"), "Words and their (start, stop), the text not normalized.");
  engine.def("__reduce_ex__",
             [](py::handle, py::handle) -> py::object { throw py::type_error("cannot pickle or copy a Unigram"); });
  bind_calls(engine);
}
