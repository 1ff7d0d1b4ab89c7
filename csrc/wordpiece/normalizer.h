// BERT text normalization, one stage after the other, exactly as Hugging Face's BertNormalizer defines it.
//
// Written to be read and to be right; the tokenizer uses it for texts that need the normalized string itself and to
// fill the table by which it normalizes all others on the fly (char_table.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/unicode.h"

namespace bert_fast::wordpiece {

struct NormalizerOptions {
  bool clean_text = true;            // drop control characters, make whitespace a space
  bool handle_chinese_chars = true;  // put a space on both sides of CJK ideographs
  bool strip_accents = true;         // NFD, then drop non-spacing marks
  bool lowercase = true;
};

// Code points and where each came from: the index of one code point of the original text.
struct NormalizedText {
  std::vector<char32_t> chars;
  std::vector<std::uint32_t> sources;  // as many as chars, ascending

  void append(char32_t c, std::uint32_t source) {
    chars.push_back(c);
    sources.push_back(source);
  }
  std::size_t size() const { return chars.size(); }
  std::string to_utf8() const;
};

// The code points of valid UTF-8 with sources first_source, first_source + 1, ...
NormalizedText decode(std::string_view utf8, std::uint32_t first_source);

// The first half: clean_text and handle_chinese_chars.
NormalizedText clean(const NormalizedText& text, const NormalizerOptions& options);

// The second half: strip_accents and lowercase.
NormalizedText fold(const NormalizedText& text, const NormalizerOptions& options);

// A run of decomposed code points in which NFD reorders: after the last starter, before the next. Sources follow the
// library: the k-th entry (in sorted order) that is the first of its original character gets the k-th original's
// source, every other entry that of the entry in front of it.
class MarkRun {
 public:
  // `first`: whether the mark is the first code point of its original character's decomposition.
  void add(char32_t mark, bool first, std::uint32_t source);
  bool empty() const { return marks_.empty(); }
  void clear();

  // Sorts the run and calls emit(mark, source) for each; `last_source` is that of the code point in front of the run.
  template <typename Emit>
  void finish(std::uint32_t last_source, Emit emit) {
    sort();
    std::size_t next_source = 0;
    for (const Mark& mark : marks_) {
      if (mark.first) last_source = sources_[next_source++];
      emit(mark.c, last_source);
    }
    clear();
  }

 private:
  struct Mark {
    char32_t c;
    std::uint8_t combining_class;
    bool first;
  };
  void sort();  // stable, by combining class, in linear time

  std::vector<Mark> marks_;
  std::vector<Mark> sorted_;
  std::vector<std::uint32_t> sources_;
};

}  // namespace bert_fast::wordpiece
