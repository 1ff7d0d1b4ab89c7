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
    scratch_.word.clear();
    scratch_.sources.clear();
    scratch_.marks.clear();
  }

  // Tokens of valid UTF-8 without added tokens; its code points are numbered from first_source.
  void encode(std::string_view text, std::uint32_t first_source) {
    p_ = text.data();
    end_ = p_ + text.size();
    source_ = first_source;
    while (p_ < end_) {
      if (num_chars_ == 0 && read_ascii_word()) continue;
      read_char();
    }
    finish_word();
  }

 private:
  enum class Next { kSpace, kIsolate, kOther };

  // Takes a short ASCII word together with the space or punctuation behind it. False if there is no such thing here.
  bool read_ascii_word() {
    if (end_ - p_ < 16) return false;
    const AsciiWord word = wordpiece::read_ascii_word(p_, options_.lowercase);
    if (word.size > WordKey::kMaxBytes || word.size > max_word_chars_) return false;
    const auto after = static_cast<unsigned char>(p_[word.size]);
    if (after >= 0x80) return false;
    const CharEntry entry = chars_[after];
    if (entry.action() != CharAction::kSpace && entry.action() != CharAction::kIsolate) return false;
    if (word.size > 0) {
      char lowered[16];
      std::memcpy(lowered, &word.key, 16);
      sink_.short_word(word.key, std::string_view(lowered, word.size), ContiguousSources{source_});
    }
    p_ += word.size + 1;
    source_ += static_cast<std::uint32_t>(word.size) + 1;
    if (entry.action() == CharAction::kIsolate) isolate(entry, source_ - 1);
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
        append_bytes(start, static_cast<std::size_t>(p_ - start), source);
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

  void append_char(char32_t c, std::uint32_t source) {
    char bytes[4];
    append_bytes(bytes, encode_utf8(c, bytes), source);
  }

  // One code point more for the present word. What exceeds the limit is counted and not kept.
  void append_bytes(const char* bytes, std::size_t size, std::uint32_t source) {
    if (num_chars_ == 0) first_source_ = source;
    word_last_source_ = source;
    if (++num_chars_ > max_word_chars_) return;
    scratch_.word.append(bytes, size);
    if constexpr (kOffsets) scratch_.sources.insert(scratch_.sources.end(), size, source);
  }

  void isolate(CharEntry entry, std::uint32_t source) {
    sink_.token(static_cast<std::int32_t>(entry.value()), source, source);
  }

  void finish_word() {
    if (num_chars_ == 0) return;
    std::string& word = scratch_.word;
    if (num_chars_ > max_word_chars_) {
      sink_.unknown(first_source_, word_last_source_);
    } else if (word.size() <= WordKey::kMaxBytes) {
      const std::size_t size = word.size();
      word.resize(16);  // WordKey::read wants 16 readable bytes
      sink_.short_word(WordKey::read(word.data(), size), std::string_view(word.data(), size), scratch_.sources.data());
    } else {
      sink_.long_word(word, scratch_.sources.data());
    }
    word.clear();
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
  std::uint32_t first_source_ = 0;
  std::uint32_t word_last_source_ = 0;
};

}  // namespace bert_fast::wordpiece
