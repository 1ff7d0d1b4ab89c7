// A harness of a few lines for the tests of csrc/wordpiece: counts failures and says where they are, puts texts where
// reading beyond them is a fault, and finds the smallest text that fails.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/batch.h"
#include "wordpiece/tokenizer.h"
#include "wordpiece/utf8.h"

namespace wordpiece_test {

namespace wp = bert_fast::wordpiece;
using Form = wp::TextView::Form;

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      ++wordpiece_test::failures();                                             \
    }                                                                           \
  } while (false)

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures() == 0 ? "passed" : "FAILED");
  return failures() == 0 ? 0 : 1;
}

inline std::vector<std::string_view> views(const std::vector<std::string>& strings) {
  return {strings.begin(), strings.end()};
}

inline wp::TextView utf8_view(std::string_view text) { return {text.data(), text.size(), Form::kUtf8}; }

inline wp::Tokens encode(const wp::TextTokenizer& tokenizer, const wp::TextView& text,
                         const wp::EncodeOptions& wanted = {true, true}, std::uint32_t first_source = 0) {
  wp::Scratch scratch;
  wp::Tokens tokens;
  tokenizer.encode(text, wanted, scratch, tokens, first_source);
  return tokens;
}

inline wp::Tokens encode(const wp::TextTokenizer& tokenizer, std::string_view text) {
  return encode(tokenizer, utf8_view(text));
}

inline bool equal(const wp::Tokens& a, const wp::Tokens& b) {
  return a.ids == b.ids && a.offsets == b.offsets && a.word_ids == b.word_ids;
}

// All texts through the pool of threads.
inline void encode_all(const wp::TextTokenizer& tokenizer, const std::vector<wp::TextView>& texts,
                       const wp::EncodeOptions& wanted, std::size_t num_threads, wp::Batch& out) {
  wp::BatchOptions options;
  options.encode = wanted;
  options.num_threads = num_threads;
  wp::encode_batch(tokenizer, texts.data(), texts.size(), options, out);
}

// The characters of bytes, each by itself: those of valid UTF-8, and the bytes in between that are none.
inline std::vector<std::string_view> split_chars(std::string_view text) {
  std::vector<std::string_view> chars;
  while (!text.empty()) {
    std::size_t size = wp::utf8_length(static_cast<unsigned char>(text[0]));
    if (size > text.size() || wp::valid_utf8_prefix(text.substr(0, size)) != size) size = 1;
    chars.push_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return chars;
}

// A part of the text that still fails and of which no character can be left out.
inline std::string shrink(const std::string& text, const std::function<bool(std::string_view)>& fails) {
  std::string smallest = text;
  for (std::size_t size = split_chars(text).size(); size > 0; size /= 2) {
    for (std::size_t start = 0;;) {
      const std::vector<std::string_view> chars = split_chars(smallest);
      if (start >= chars.size()) break;
      std::string shorter;
      for (std::size_t i = 0; i < chars.size(); ++i) {
        if (i < start || i >= start + size) shorter += chars[i];
      }
      if (fails(shorter)) {
        smallest = shorter;
      } else {
        start += size;
      }
    }
  }
  return smallest;
}

// As a literal that C++ and (behind b) Python read.
inline std::string literal(std::string_view text) {
  std::string shown = "\"";
  for (const char c : text) {
    char escaped[8];
    const bool plain = c >= ' ' && c <= '~' && c != '"' && c != '\\';
    std::snprintf(escaped, sizeof(escaped), plain ? "%c" : "\\x%02x", static_cast<unsigned char>(c));
    shown += escaped;
  }
  return shown + '"';
}

inline std::string show(const wp::Tokens& tokens) {
  std::string shown;
  for (std::size_t i = 0; i < tokens.ids.size(); ++i) {
    shown += (i > 0 ? " " : "") + std::to_string(tokens.ids[i]);
    if (!tokens.offsets.empty()) {
      shown += '(' + std::to_string(tokens.offsets[2 * i]) + ',' + std::to_string(tokens.offsets[2 * i + 1]) + ')';
    }
    if (!tokens.word_ids.empty()) shown += 'w' + std::to_string(tokens.word_ids[i]);
  }
  return shown.empty() ? "nothing" : shown;
}

inline std::string show(const wp::TokenizerOptions& options) {
  const wp::NormalizerOptions& n = options.normalizer;
  return "clean_text=" + std::to_string(n.clean_text) +
         " handle_chinese_chars=" + std::to_string(n.handle_chinese_chars) +
         " strip_accents=" + std::to_string(n.strip_accents) + " lowercase=" + std::to_string(n.lowercase) +
         " max_word_chars=" + std::to_string(options.max_word_chars) + " prefix=" + literal(options.continuing_prefix) +
         " added_tokens=" + std::to_string(options.added_tokens.size());
}

// Memory between two pages that cannot be touched: who reads a byte behind a text, or in front of it, gets a fault.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() { unmap(); }

  // The same text, ending where the memory ends (or starting where it starts). Overwrites the one before.
  wp::TextView place(const wp::TextView& text, bool at_end = true) {
    const std::size_t size = text.size_bytes();
    if (size > size_ || data_ == nullptr) map(size);
    char* to = at_end ? data_ + (size_ - size) : data_;
    if (size > 0) std::memcpy(to, text.data, size);
    return {to, text.length, text.form};
  }

 private:
  void map(std::size_t size) {
    unmap();
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    size_ = (size / page + 1) * page;
    void* all = mmap(nullptr, size_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) std::abort();
    data_ = static_cast<char*>(all) + page;
    if (mprotect(data_, size_, PROT_READ | PROT_WRITE) != 0) std::abort();
  }
  void unmap() {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (data_ != nullptr) munmap(data_ - page, size_ + 2 * page);
    data_ = nullptr;
  }

  char* data_ = nullptr;
  std::size_t size_ = 0;
};

// A text in every form that it can have, converted from UTF-8 (broken bytes count as U+FFFD in all but UTF-8).
class AllForms {
 public:
  explicit AllForms(std::string_view text) : utf8_(text) {
    std::string storage;
    const std::string_view valid = wp::to_utf8(utf8_view(text), storage);
    ucs4_.reserve(valid.size());
    for (const char *p = valid.data(), *end = p + valid.size(); p < end;) ucs4_.push_back(wp::decode_utf8(p));
    char32_t largest = 0;
    for (const char32_t c : ucs4_) largest = std::max(largest, c);
    if (largest < 0x10000) ucs2_.assign(ucs4_.begin(), ucs4_.end());
    if (largest < 0x100) ucs1_.assign(ucs4_.begin(), ucs4_.end());
    views_.reserve(5);
    // The narrowest first: what a Python string of these characters is.
    if (largest < 0x80) views_.push_back({ucs1_.data(), ucs1_.size(), Form::kAscii});
    if (largest < 0x100) views_.push_back({ucs1_.data(), ucs1_.size(), Form::kUcs1});
    if (largest < 0x10000) views_.push_back({ucs2_.data(), ucs2_.size(), Form::kUcs2});
    views_.push_back({ucs4_.data(), ucs4_.size(), Form::kUcs4});
    views_.push_back(utf8_view(utf8_));
  }
  AllForms(const AllForms&) = delete;
  AllForms& operator=(const AllForms&) = delete;

  const std::vector<wp::TextView>& views() const { return views_; }
  const std::vector<char32_t>& code_points() const { return ucs4_; }

 private:
  std::string utf8_;
  std::vector<char32_t> ucs4_;
  std::vector<char16_t> ucs2_;
  std::vector<unsigned char> ucs1_;
  std::vector<wp::TextView> views_;
};

inline const char* name_of(Form form) {
  switch (form) {
    case Form::kAscii:
      return "ASCII";
    case Form::kUtf8:
      return "UTF-8";
    case Form::kUcs1:
      return "UCS-1";
    case Form::kUcs2:
      return "UCS-2";
    default:
      return "UCS-4";
  }
}

}  // namespace wordpiece_test
