// One table lookup per code point: what normalization and pre-tokenization together do with it.
//
// The normalizer's stages (normalizer.h) act on single code points, but for the reordering of combining marks. So they
// can be applied to every code point once, for the options of one tokenizer, and their outcome be stored.
#pragma once

#include <cstdint>
#include <vector>

#include "wordpiece/normalizer.h"
#include "wordpiece/unicode.h"

namespace bert_fast::wordpiece {

enum class CharAction : std::uint8_t {
  kCopy,        // part of a word, as it is
  kSubstitute,  // part of a word, as the code point value()
  kRemove,
  kSpace,    // separates words
  kIsolate,  // a word of its own, which is the token value()
  kExpand,   // anything else: several code points; see expand_char
};

class CharEntry {
 public:
  // For canonical reordering; set only where accents are stripped.
  static constexpr std::uint32_t kStartsWithMark = 8;  // its decomposition starts with a combining class other than 0
  static constexpr std::uint32_t kEndsWithMark = 16;   // ... ends with one: the next character may be sorted before it
  static constexpr std::uint32_t kInvisible = 32;      // removed before decomposition, so marks meet across it

  CharEntry() = default;
  CharEntry(CharAction action, std::uint32_t value, std::uint32_t marks)
      : bits_(static_cast<std::uint32_t>(action) | marks | value << 6) {}

  CharAction action() const { return static_cast<CharAction>(bits_ & 7); }
  std::uint32_t value() const { return bits_ >> 6; }
  bool has(std::uint32_t mark_bit) const { return (bits_ & mark_bit) != 0; }
  CharEntry with_value(std::uint32_t value) const {
    CharEntry entry;
    entry.bits_ = (bits_ & 63) | value << 6;
    return entry;
  }
  bool operator==(const CharEntry& other) const { return bits_ == other.bits_; }

 private:
  std::uint32_t bits_ = 0;
};

// Largest token id that an entry can hold.
constexpr std::int32_t kMaxTokenId = (1 << 26) - 1;

// How a code point of normalized text splits it into words.
enum class CharClass : std::uint8_t { kWord, kSpace, kPunctuation };
CharClass classify(char32_t c);

// What all stages make of one code point outside a run of marks. CJK spacing is left out: see is_cjk.
Mapping expand_char(char32_t c, const NormalizerOptions& options);

// A token that is a single code point.
struct CharToken {
  char32_t c;
  std::int32_t id;
};

class CharTable {
 public:
  // tokens: those of one code point; other words of one code point are the token `unknown`.
  CharTable(const NormalizerOptions& options, const std::vector<CharToken>& tokens, std::int32_t unknown);

  CharEntry operator[](char32_t c) const {
    return entries_[static_cast<std::size_t>(blocks_[c / kUnicodeBlock]) * kUnicodeBlock + c % kUnicodeBlock];
  }
  // The same for c < kUnicodeBlock, whose block is the first: one load less.
  CharEntry ascii(unsigned char c) const { return entries_[c]; }

 private:
  std::vector<std::uint16_t> blocks_;
  std::vector<CharEntry> entries_;
};

}  // namespace bert_fast::wordpiece
