// The public header: files of vocabularies, options, one text and many, errors.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bert_fast/wordpiece.h"
#include "wordpiece_check.h"

using bert_fast::BatchEncoding;
using bert_fast::EncodeOptions;
using bert_fast::Encoding;
using bert_fast::WordPiece;
using bert_fast::WordPieceOptions;

namespace {

const std::vector<std::string> kVocab = {"[PAD]", "[UNK]",  "[CLS]", "[SEP]", "[MASK]",       "hello", "un",
                                         "##aff", "##able", ",",     "Hello", "\xE4\xB8\xAD", "e"};

template <typename T>
bool equal(const bert_fast::Array<T>& values, const std::vector<T>& expected) {
  return std::vector<T>(values.begin(), values.end()) == expected;
}
using Ids = std::vector<std::int32_t>;

// A file that is gone with this object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content) {
    const int file = mkstemp(path_.data());
    CHECK(file >= 0);
    CHECK(write(file, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
    close(file);
  }
  ~TemporaryFile() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = std::filesystem::temp_directory_path() / "bert_fast_vocab_XXXXXX";
};

std::string lines(const std::vector<std::string>& vocab, const char* end_of_line) {
  std::string content;
  for (const std::string& token : vocab) content += token + end_of_line;
  return content;
}

void test_files() {
  for (const std::string& content : {lines(kVocab, "\n"), lines(kVocab, "\r\n")}) {
    for (const bool last_end : {true, false}) {
      const std::size_t cut = last_end ? 0 : 1;
      const TemporaryFile file(content.substr(0, content.size() - cut));
      const WordPiece tokenizer = WordPiece::from_file(file.path());
      CHECK(tokenizer.vocab_size() == kVocab.size());
      for (std::size_t i = 0; i < kVocab.size(); ++i) {
        CHECK(tokenizer.token(static_cast<std::int32_t>(i)) == kVocab[i]);
        CHECK(tokenizer.id(kVocab[i]) == static_cast<std::int32_t>(i));
      }
      CHECK(!tokenizer.id("none"));
      CHECK(equal(tokenizer.encode("unaffable").ids, Ids({6, 7, 8})));
    }
  }
  // Line separators of Unicode are characters, an empty line is a token.
  const TemporaryFile odd("[UNK]\n\n\xE2\x80\xA8\nb");
  CHECK(WordPiece::from_file(odd.path()).vocab_size() == 4);
}

template <typename Error, typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void test_errors() {
  const auto file_error = [](const std::string& content) {
    const TemporaryFile file(content);
    std::string message = error_of<std::invalid_argument>([&] { WordPiece::from_file(file.path()); });
    const std::size_t path = message.find(file.path());
    return path == std::string::npos ? message : message.replace(path, file.path().size(), "PATH");
  };
  CHECK(file_error("[UNK]\na\nb\na\n") == "vocab: expected distinct tokens, got 'a' at positions 1 and 3");
  CHECK(file_error("") == "unk_token: expected a token of the vocabulary, got '[UNK]'");
  CHECK(file_error("[UNK]\na\xFF\n") == "vocab: expected UTF-8, got another byte in the token at position 1");
  CHECK(file_error("\xEF\xBB\xBF[UNK]\n") == "vocab: PATH starts with a byte order mark; save it as UTF-8 without one");
  CHECK(error_of<std::runtime_error>([] { WordPiece::from_file("/nowhere/vocab.txt"); }) ==
        "vocab: cannot open /nowhere/vocab.txt: No such file or directory");
  CHECK(error_of<std::runtime_error>([] { WordPiece::from_file("/"); }) == "vocab: cannot read /: Is a directory");

  const WordPiece tokenizer(kVocab);
  CHECK(error_of<std::out_of_range>([&] { tokenizer.token(13); }) == "id: expected a number from 0 to 12, got 13");
  CHECK(error_of<std::out_of_range>([&] { tokenizer.token(-1); }) == "id: expected a number from 0 to 12, got -1");
  EncodeOptions special;
  special.add_special_tokens = true;
  const WordPiece without({"[UNK]", "[CLS]"});
  CHECK(error_of<std::invalid_argument>([&] { without.encode("a", special); }) ==
        "add_special_tokens: expected '[CLS]' and '[SEP]' in the vocabulary, got none of '[SEP]'");
  CHECK(without.encode("a").ids.size() == 1);
}

void test_encode() {
  const WordPiece tokenizer(kVocab);
  CHECK(tokenizer.encode("").ids.empty());
  const Encoding plain = tokenizer.encode("Hello, \xC3\xA9[MASK]");
  CHECK(equal(plain.ids, Ids({5, 9, 12, 4})) && plain.offsets.empty() && plain.word_ids.empty());
  EncodeOptions all;
  all.add_special_tokens = all.offsets = all.word_ids = true;
  all.max_tokens = 4;
  const Encoding full = tokenizer.encode("hello unaffable", all);
  CHECK(equal(full.ids, Ids({2, 5, 6, 7, 8, 3})));
  CHECK(equal(full.offsets, Ids({0, 0, 0, 5, 6, 8, 8, 11, 11, 15, 0, 0})));
  CHECK(equal(full.word_ids, Ids({-1, 0, 1, 1, 1, -1})));
  all.max_tokens = 2;
  CHECK(equal(tokenizer.encode("hello unaffable", all).ids, Ids({2, 5, 6, 3})));
}

void test_options() {
  const auto ids = [](const std::string& text, const WordPieceOptions& options) {
    const Encoding encoding = WordPiece(kVocab, options).encode(text);
    return Ids(encoding.ids.begin(), encoding.ids.end());
  };
  WordPieceOptions options;
  options.lowercase = false;
  CHECK(ids("Hello hello \xC3\xA9", options) == Ids({10, 5, 1}));  // accents stay with the case
  options.strip_accents = true;
  CHECK(ids("\xC3\xA9", options) == Ids({12}));
  options.special_tokens.clear();
  CHECK(ids("[MASK]", options) == Ids({1, 1, 1}));
  options.split_chinese_chars = false;
  CHECK(ids("\xE4\xB8\xAD\xE4\xB8\xAD", options) == Ids({1}));
  options.max_word_chars = 4;
  CHECK(ids("hello", options) == Ids({1}));
  options.clean_text = false;
  CHECK(ids("e\x01", options) == Ids({1}));
  WordPieceOptions other;
  other.unk_token = "e";
  other.continuing_prefix = "u";
  other.cls_token = "hello";
  CHECK(ids("xyz en", other) == Ids({12, 12, 6}));  // 'un' continues words now
  EncodeOptions special;
  special.add_special_tokens = true;
  CHECK(equal(WordPiece(kVocab, other).encode("", special).ids, Ids({5, 3})));
}

void test_batch() {
  const WordPiece tokenizer(kVocab);
  const std::vector<std::string> texts = {"hello", "", "Hello, unaffable", std::string(400000, ' ') + "un"};
  EncodeOptions options;
  options.offsets = options.word_ids = true;
  for (const std::size_t num_threads : {0, 1, 3}) {
    options.num_threads = num_threads;
    const BatchEncoding batch = tokenizer.encode_batch(texts, options);
    CHECK(equal(batch.ids, Ids({5, 5, 9, 6, 7, 8, 6})));
    CHECK(equal(batch.boundaries, std::vector<std::int64_t>({0, 1, 1, 6, 7})));
    CHECK(equal(batch.offsets, Ids({0, 5, 0, 5, 5, 6, 7, 9, 9, 12, 12, 16, 400000, 400002})));
    CHECK(equal(batch.word_ids, Ids({0, 0, 1, 2, 2, 2, 0})));
  }
  const BatchEncoding empty = tokenizer.encode_batch(std::vector<std::string_view>());
  CHECK(empty.ids.empty() && equal(empty.boundaries, std::vector<std::int64_t>({0})));
}

void test_copies_and_threads() {
  std::string_view token;
  const WordPiece copy = [&] {
    const WordPiece tokenizer(kVocab);
    token = tokenizer.token(5);
    return tokenizer;
  }();
  CHECK(token == "hello");  // it lives with the copy
  std::vector<std::thread> threads;
  std::vector<int> right(4, 0);
  for (int& each : right) {
    threads.emplace_back([&copy, &each] {
      for (int i = 0; i < 200; ++i) each += copy.encode("Hello, unaffable").ids.size() == 5;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == std::vector<int>(4, 200));

  bert_fast::Array<std::int32_t> ids = copy.encode("hello").ids;
  bert_fast::Array<std::int32_t> moved = std::move(ids);
  CHECK(ids.empty() && ids.begin() == ids.end() && moved.size() == 1 && moved[0] == 5);
  ids = std::move(moved);
  CHECK(moved.empty() && ids.size() == 1);
}

}  // namespace

int main() {
  test_files();
  test_errors();
  test_encode();
  test_options();
  test_batch();
  test_copies_and_threads();
  return wordpiece_test::report("wordpiece_api");
}
