// The fast way through a text: one table lookup per code point, words gathered as they are read.
#pragma once

#include <cstdint>
#include <string_view>

#include "wordpiece/ascii.h"
#include "wordpiece/char_table.h"
#include "wordpiece/normalizer.h"
#include "wordpiece/tokenizer.h"
#include "wordpiece/utf8.h"
#include "wordpiece/word_sink.h"

namespace bert_fast::wordpiece {

template <bool kOffsets>
class StreamEncoder {
 public:
  StreamEncoder(const CharTable& chars, const NormalizerOptions& options, std::size_t max_word_chars, Scratch& scratch,
                WordSink<kOffsets>& sink)
      : chars_(chars), options_(options), max_word_chars_(max_word_chars), scratch_(scratch), sink_(sink) {
    scratch_.marks.clear();
    if (scratch_.word.empty()) grow_word();
  }

  // Tokens of valid UTF-8 without added tokens; its code points are numbered from first_source.
  void encode(std::string_view text, std::uint32_t first_source) {
    p_ = text.data();
    end_ = p_ + text.size();
    source_ = first_source;
    while (p_ < end_) {
      if (is_ascii(*p_)) {
        if (num_chars_ == 0) read_ascii_words();
        if (append_ascii()) continue;
      }
      read_char();
    }
    finish_word();
  }

 private:
  static bool is_ascii(char byte) { return static_cast<signed char>(byte) >= 0; }

  // Takes words of up to 15 letters and digits of ASCII, each with the space or punctuation behind it, as long as there
  // is nothing else. Leaves at least one byte, so that what follows need not ask.
  void read_ascii_words() {
    const char* p = p_;
    std::uint32_t source = source_;
    while (end_ - p > 16 && is_ascii(*p)) {
      const AsciiWord word = read_ascii_word(p, options_.lowercase);
      if (word.size > WordKey::kMaxBytes || word.size > max_word_chars_) break;
      const char* after = p + word.size;
      const CharEntry entry =
          is_ascii(*after) ? chars_.ascii(static_cast<unsigned char>(*after++)) : chars_[decode_utf8(after)];
      const bool is_space = entry.action() == CharAction::kSpace;
      if (!(is_space || entry.action() == CharAction::kIsolate) || entry.has(CharEntry::kEndsWithMark)) break;
      if (after == end_) break;
      if (word.size > 0) {
        char bytes[16];
        word.write(bytes);
        sink_.short_word(word.key(), std::string_view(bytes, word.size), ContiguousSources{source});
      }
      p = after;
      source += static_cast<std::uint32_t>(word.size) + 1;
      if (!is_space) isolate(entry, source - 1);
    }
    p_ = p;
    source_ = source;
  }

  // Takes letters and digits of ASCII for the present word, if it stays within the limit with them.
  bool append_ascii() {
    if (end_ - p_ < 16 || !is_ascii(*p_)) return false;
    const AsciiWord part = read_ascii_word(p_, options_.lowercase);
    if (part.size == 0 || num_chars_ + part.size > max_word_chars_) return false;
    if (num_chars_ == 0) first_source_ = source_;
    part.write(room(16));
    word_size_ += part.size;
    num_chars_ += part.size;
    for (std::size_t i = 0; kOffsets && i < part.size; ++i) {
      scratch_.sources.push_back(source_ + static_cast<std::uint32_t>(i));
    }
    p_ += part.size;
    source_ += static_cast<std::uint32_t>(part.size);
    word_last_source_ = source_ - 1;
    return true;
  }

  // Takes one code point, or a run of combining marks together with the character before it.
  void read_char() {
    const char* start = p_;
    const char32_t c = decode_utf8(p_);
    const CharEntry entry = chars_[c];
    if (entry.has(CharEntry::kEndsWithMark) && mark_follows()) {
      p_ = start;
      read_mark_run();
      return;
    }
    const std::uint32_t source = source_++;
    switch (entry.action()) {
      case CharAction::kCopy:
        append_char(c, source);
        break;
      case CharAction::kSubstitute:
        append_char(entry.value(), source);
        break;
      case CharAction::kRemove:
        break;
      case CharAction::kSpace:
        finish_word();
        break;
      case CharAction::kIsolate:
        finish_word();
        isolate(entry, source);
        break;
      case CharAction::kExpand: {
        const Mapping out = expand_char(c, options_);
        const bool alone = options_.handle_chinese_chars && is_cjk(c);
        if (alone) finish_word();
        for (std::size_t k = 0; k < out.size; ++k) append_classified(out.chars[k], source);
        if (alone) finish_word();
        break;
      }
    }
  }

  // Whether the next character that is seen by decomposition could be sorted before the one just read.
  bool mark_follows() const {
    for (const char* q = p_; q < end_;) {
      const CharEntry entry = chars_[decode_utf8(q)];
      if (!entry.has(CharEntry::kInvisible)) return entry.has(CharEntry::kStartsWithMark);
    }
    return false;
  }

  // Canonical reordering: takes the character at p_ and all that follow up to the next starter.
  void read_mark_run() {
    const auto append = [&](char32_t c, std::uint32_t source) {
      last_source_ = source;
      if (is_mark(c)) return;
      if (!options_.lowercase) return append_classified(c, source);
      const Mapping lowered = to_lower(c);
      for (std::size_t k = 0; k < lowered.size; ++k) append_classified(lowered.chars[k], source);
    };
    bool is_first = true;
    while (p_ < end_) {
      const char* q = p_;
      const char32_t c = decode_utf8(q);
      const CharEntry entry = chars_[c];
      const bool invisible = entry.has(CharEntry::kInvisible);
      if (!is_first && !invisible && !entry.has(CharEntry::kStartsWithMark)) break;
      is_first = false;
      p_ = q;
      const std::uint32_t source = source_++;
      if (invisible) continue;
      const Mapping parts = decompose(c);
      for (std::size_t k = 0; k < parts.size; ++k) {
        if (combining_class(parts.chars[k]) != 0) {
          scratch_.marks.add(parts.chars[k], k == 0, source);
        } else {
          scratch_.marks.finish(last_source_, append);
          append(parts.chars[k], source);
        }
      }
    }
    scratch_.marks.finish(last_source_, append);
  }

  void append_classified(char32_t c, std::uint32_t source) {
    const CharClass type = classify(c);
    if (type != CharClass::kWord) finish_word();
    if (type == CharClass::kSpace) return;
    append_char(c, source);
    if (type == CharClass::kPunctuation) finish_word();
  }

  // One code point more for the present word. What exceeds the limit is counted and not kept.
  void append_char(char32_t c, std::uint32_t source) {
    if (num_chars_ == 0) first_source_ = source;
    word_last_source_ = source;
    if (++num_chars_ > max_word_chars_) return;
    const std::size_t size = encode_utf8(c, room(4));
    word_size_ += size;
    if constexpr (kOffsets) scratch_.sources.insert(scratch_.sources.end(), size, source);
  }

  // The end of the present word, with room for `size` <= 16 bytes.
  char* room(std::size_t size) {
    if (word_size_ + size > scratch_.word.size()) grow_word();
    return scratch_.word.data() + word_size_;
  }
  void grow_word() { scratch_.word.resize(2 * scratch_.word.size() + 64); }

  void isolate(CharEntry entry, std::uint32_t source) {
    sink_.token(static_cast<std::int32_t>(entry.value()), source, source);
  }

  void finish_word() {
    if (num_chars_ == 0) return;
    const std::string_view word(scratch_.word.data(), word_size_);  // 16 bytes can be read there
    const std::uint32_t* sources = scratch_.sources.data();
    if (num_chars_ > max_word_chars_) {
      sink_.unknown(first_source_, word_last_source_);
    } else if (word.size() <= WordKey::kMaxBytes) {
      sink_.short_word(WordKey::read(word.data(), word.size()), word, sources);
    } else {
      sink_.long_word(word, sources);
    }
    word_size_ = 0;
    scratch_.sources.clear();
    num_chars_ = 0;
  }

  const CharTable& chars_;
  const NormalizerOptions& options_;
  const std::size_t max_word_chars_;
  Scratch& scratch_;
  WordSink<kOffsets>& sink_;

  const char* p_ = nullptr;
  const char* end_ = nullptr;
  std::uint32_t source_ = 0;  // of the code point at p_
  std::uint32_t last_source_ = 0;

  std::size_t num_chars_ = 0;  // of the present word
  std::size_t word_size_ = 0;  // in bytes, of what is kept of it
  std::uint32_t first_source_ = 0;
  std::uint32_t word_last_source_ = 0;
};

}  // namespace bert_fast::wordpiece
