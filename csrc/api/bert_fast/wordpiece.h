// BERT's tokenizer for C++ programs: texts in, token ids out, equal to those of Hugging Face `tokenizers`.
//
//     const bert_fast::WordPiece tokenizer = bert_fast::WordPiece::from_file("vocab.txt");
//     for (const std::int32_t id : tokenizer.encode("Hello, world!").ids) std::cout << tokenizer.token(id) << '\n';
//
// Texts are UTF-8; each maximal invalid part counts as one U+FFFD. This header is the interface: it needs no other one
// of the project, and what it declares changes in releases only, as CHANGELOG.md says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bert_fast {

// An array that owns its memory and was never filled with zeros; to be moved, not copied.
template <typename T>
class Array {
 public:
  Array() = default;
  // Takes over memory from std::malloc.
  Array(T* data, std::size_t size) : data_(data), size_(size) {}
  Array(Array&& other) noexcept : data_(std::move(other.data_)), size_(other.size_) { other.size_ = 0; }
  Array& operator=(Array&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = other.size_;
    other.size_ = 0;
    return *this;
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

// Defaults are those of an uncased BERT.
struct WordPieceOptions {
  bool lowercase = true;
  std::optional<bool> strip_accents;  // as lowercase where not set
  bool split_chinese_chars = true;    // every CJK ideograph is a word
  bool clean_text = true;             // control characters are removed, any whitespace separates words
  std::string unk_token = "[UNK]";
  std::string continuing_prefix = "##";
  std::size_t max_word_chars = 100;  // code points; longer words are unknown
  // Found in a text as they are, before anything else is done to it. Those that the vocabulary does not have are left
  // out.
  std::vector<std::string> special_tokens = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
  std::string cls_token = "[CLS]";  // what EncodeOptions::add_special_tokens puts in front of a text
  std::string sep_token = "[SEP]";  // ... and behind it
};

struct EncodeOptions {
  bool add_special_tokens = false;
  bool offsets = false;
  bool word_ids = false;
  // Of each text, not counting those that add_special_tokens adds. What follows is left out, and mostly unread.
  std::size_t max_tokens = static_cast<std::size_t>(-1);
  std::size_t num_threads = 0;  // 0: as many as the calling thread has processors and the texts are worth
};

// Tokens of one text.
struct Encoding {
  Array<std::int32_t> ids;
  // Empty unless asked for. Start and stop of each token, in code points of the text: 2 per token; (0, 0) for a token
  // that was added.
  Array<std::int32_t> offsets;
  // Empty unless asked for. The number of the word that each token is of; -1 for a token that was added.
  Array<std::int32_t> word_ids;
};

// Tokens of several texts, one after the other. Those of text i are [boundaries[i], boundaries[i + 1]) of ids, and of
// the others as in Encoding.
struct BatchEncoding {
  Array<std::int32_t> ids;
  Array<std::int32_t> offsets;
  Array<std::int32_t> word_ids;
  Array<std::int64_t> boundaries;  // texts + 1
};

// A vocabulary and its options. Immutable; copies share what they are made of. Every method may be called from several
// threads at once; the threads that a call starts are kept for later ones, and a process may fork at any time.
class WordPiece {
 public:
  // Reads a vocab.txt: UTF-8, one token a line (LF or CR LF), the number of the line (from 0) is the id. Throws
  // std::runtime_error if the file cannot be read, and what the constructor throws.
  static WordPiece from_file(const std::string& path, const WordPieceOptions& options = {});

  // Ids are positions in `vocab`. Throws std::invalid_argument if a token is not UTF-8 or occurs twice, or if
  // unk_token is not among them.
  explicit WordPiece(std::vector<std::string> vocab, const WordPieceOptions& options = {});

  // Throws std::invalid_argument if add_special_tokens is on and the vocabulary has no cls_token or sep_token;
  // std::length_error if offsets are wanted of a text of 2^31 bytes or more; std::bad_alloc.
  Encoding encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The same for many texts at once, shared among threads; long texts are cut where that changes nothing, and shared as
  // well. The result does not depend on the number of threads.
  BatchEncoding encode_batch(const std::string_view* texts, std::size_t num_texts,
                             const EncodeOptions& options = {}) const;
  BatchEncoding encode_batch(const std::vector<std::string_view>& texts, const EncodeOptions& options = {}) const {
    return encode_batch(texts.data(), texts.size(), options);
  }
  BatchEncoding encode_batch(const std::vector<std::string>& texts, const EncodeOptions& options = {}) const {
    return encode_batch(std::vector<std::string_view>(texts.begin(), texts.end()), options);
  }

  std::size_t vocab_size() const;
  // Throws std::out_of_range if there is no such id. The view lives as long as any copy of this object.
  std::string_view token(std::int32_t id) const;
  // The id of a token by its own spelling ("##s" for the piece), or none. Looks through the vocabulary.
  std::optional<std::int32_t> id(std::string_view token) const;

 private:
  struct Model;
  std::shared_ptr<const Model> model_;
};

}  // namespace bert_fast
