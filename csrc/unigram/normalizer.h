// The steps by which a text becomes what the vocabulary is matched against, with where each character comes from.
//
// The characters of a text after a step, and for each the range of the original text that it stands for, are those of
// Hugging Face `tokenizers`, its peculiarities included: a replacement that is longer than what it replaces takes its
// range, one that is empty leaves none, and what is removed in front of all else shifts the ranges of what follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "unigram/charsmap.h"

namespace bert_fast::unigram {

// Code points, and where they come from: code points [start, stop) of the original text.
struct MappedText {
  std::vector<char32_t> chars;
  std::vector<std::uint32_t> starts;
  std::vector<std::uint32_t> stops;

  std::size_t size() const { return chars.size(); }
  void clear();
  void push(char32_t c, std::uint32_t start, std::uint32_t stop);
  // The characters [begin, end) alone.
  void keep(std::size_t begin, std::size_t end);
};

struct NormalizerStep {
  enum class Kind {
    kCharsmap,           // replaces by the character map
    kStrip,              // removes whitespace at the ends
    kReplaceText,        // puts `content` in the place of every `pattern`
    kReplaceSpaces,      // puts `content` in the place of every run of at least `least` spaces
    kReplaceWhitespace,  // ... of at least two characters of whitespace, and of every "\n", "\r" and "\t"
    kLowercase,
    kCompose,  // NFC
  };
  Kind kind = Kind::kStrip;
  bool left = false;
  bool right = false;
  std::string pattern;  // UTF-8, not empty
  std::string content;
  std::size_t least = 2;
};

class Normalizer {
 public:
  Normalizer(Charsmap charsmap, std::vector<NormalizerStep> steps);

  // In place. `first` is the number of the first code point of the original text. `strips_left` is false for a part of
  // a text whose start was stripped before.
  void apply(MappedText& text, std::uint32_t first, bool strips_left = true) const;

  // Whether the map, lower case and composition leave the character as it is where no character that continues clusters
  // or composes with it stands behind it, and none that takes it along in front of it. Plain ones do neither.
  bool is_plain(char32_t c) const { return (plain_[c / 64] >> c % 64 & 1) != 0; }
  // What the map puts in the place of the character where it is looked up alone; none: it stays.
  std::optional<std::string_view> replacement_of(char32_t c) const;
  // Whether the map replaces the character together with one that continues its cluster, or as "\r\n".
  bool joins(char32_t c) const;
  // Whether the map replaces anything by nothing.
  bool removes() const { return removes_; }

 private:
  void replace_by_map(MappedText& text, std::uint32_t first) const;

  Charsmap charsmap_;
  std::vector<NormalizerStep> steps_;
  std::vector<std::uint64_t> plain_;  // a bit for each code point
  bool removes_ = false;
};

// The code points of valid UTF-8, each its own range from `first` on.
MappedText map_text(std::string_view utf8, std::uint32_t first);
std::string to_utf8(const MappedText& text, std::size_t begin, std::size_t end);

}  // namespace bert_fast::unigram
