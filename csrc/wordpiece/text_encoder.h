// The way through a text: ASCII in blocks, other characters one at a time by one table lookup each; words are gathered
// in a work area that stays in the cache, and looked up together whenever it is full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "wordpiece/char_table.h"
#include "wordpiece/kernels.h"
#include "wordpiece/normalizer.h"
#include "wordpiece/text_units.h"
#include "wordpiece/word_sink.h"

namespace bert_fast::wordpiece {

// Normalized text whose words are not looked up yet; see WordSpans.
struct WorkArea {
  static constexpr std::size_t kBytes = 4096;  // grows for words that are longer than half of it

  Buffer<char> text;
  Buffer<std::uint32_t> starts;
  Buffer<std::uint32_t> lasts;
  Buffer<std::uint32_t> sources;  // of each byte of text, where offsets are asked for
  FoundWords found;
  std::size_t capacity = 0;  // bytes of text; WordSpans::kSlack more are there

  // Keeps what is there.
  void grow(std::size_t bytes) {
    if (bytes >= WordSpans::kLiteral / 2) throw std::length_error("texts: expected words of less than 1 GiB");
    text.reserve(bytes + WordSpans::kSlack);
    starts.reserve(bytes + WordSpans::kSlack);
    lasts.reserve(bytes + WordSpans::kSlack);
    sources.reserve(bytes + WordSpans::kSlack);
    capacity = bytes;
  }
};

// What all encoders of one tokenizer share.
struct TextRules {
  const CharTable& chars;
  const AsciiClasses& ascii;
  const NormalizerOptions& options;
  const Kernels& kernels;
  std::size_t max_word_chars;
};

template <typename Units, bool kOffsets>
class TextEncoder {
 public:
  using Unit = typename Units::Unit;

  TextEncoder(const TextRules& rules, WorkArea& area, MarkRun& marks, WordSink<kOffsets>& sink)
      : rules_(rules), area_(area), marks_(marks), sink_(sink) {
    if (area.capacity == 0) area.grow(WorkArea::kBytes);
    marks_.clear();
    spans_.text = area.text.data();
    spans_.starts = area.starts.data();
    spans_.lasts = area.lasts.data();
  }

  // Tokens of a text without added tokens; its code points are numbered from first_source. May stop as soon as the sink
  // has max_tokens tokens in all.
  void encode(const Unit* text, std::size_t size, std::uint32_t first_source, std::size_t max_tokens) {
    p_ = text;
    end_ = text + size;
    source_ = first_source;
    int num_single = 0;  // characters of ASCII that are taken one at a time, because others stood in front of them
    while (p_ < end_) {
      if (room() < 2 * kStep) {
        look_up();
        if (sink_.num_tokens() >= max_tokens) return;
      }
      if (*p_ >= 0x80) {
        num_single = kSingle;
      } else if (num_single > 0) {
        --num_single;
      } else if (read_ascii()) {
        continue;
      }
      read_char();
    }
    close_word();
    look_up();
  }

 private:
  static constexpr int kSingle = 4;         // a block costs as much as so many characters
  static constexpr std::size_t kStep = 64;  // bytes: more than a character adds

  std::size_t room() const { return area_.capacity - spans_.size; }

  // Takes ASCII as far as its classes are known; false if the next character is none of it and needs a closer look.
  bool read_ascii() {
    const std::size_t size = std::min(static_cast<std::size_t>(end_ - p_), room() - kStep);
    const std::uint32_t before = spans_.size;
    std::size_t taken, given = size;
    if constexpr (Units::kIsBytes) {
      taken = rules_.kernels.scan(rules_.ascii, reinterpret_cast<const char*>(p_), size, spans_);
    } else {
      char block[2 * kStep];
      given = Units::narrow(rules_.kernels, p_, std::min(size, kStep), block);
      taken = rules_.kernels.scan(rules_.ascii, block, given, spans_);
    }
    if constexpr (kOffsets) {
      std::uint32_t* const sources = area_.sources.data() + before;
      for (std::size_t i = 0; i < taken; ++i) sources[i] = source_ + static_cast<std::uint32_t>(i);
    }
    p_ += taken;
    source_ += static_cast<std::uint32_t>(taken);
    return taken == given;
  }

  // Takes one code point, or a run of combining marks together with the character before it.
  void read_char() {
    const Unit* const start = p_;
    const char32_t c = Units::read(p_);
    const CharEntry entry = rules_.chars[c];
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
        close_word();
        break;
      case CharAction::kIsolate:
        isolate(entry.value(), source);
        break;
      case CharAction::kExpand: {
        const Mapping out = expand_char(c, rules_.options);
        const bool alone = rules_.options.handle_chinese_chars && is_cjk(c);
        if (alone) close_word();
        for (std::size_t k = 0; k < out.size; ++k) append_classified(out.chars[k], source);
        if (alone) close_word();
        break;
      }
    }
  }

  // Whether the next character that is seen by decomposition could be sorted before the one just read.
  bool mark_follows() const {
    for (const Unit* q = p_; q < end_;) {
      const CharEntry entry = rules_.chars[Units::read(q)];
      if (!entry.has(CharEntry::kInvisible)) return entry.has(CharEntry::kStartsWithMark);
    }
    return false;
  }

  // Canonical reordering: takes the character at p_ and all that follow up to the next starter.
  void read_mark_run() {
    const auto append = [&](char32_t c, std::uint32_t source) {
      last_source_ = source;
      if (is_mark(c)) return;
      if (room() < kStep) look_up();
      if (!rules_.options.lowercase) return append_classified(c, source);
      const Mapping lowered = to_lower(c);
      for (std::size_t k = 0; k < lowered.size; ++k) append_classified(lowered.chars[k], source);
    };
    bool is_first = true;
    while (p_ < end_) {
      const Unit* q = p_;
      const CharEntry entry = rules_.chars[Units::read(q)];
      const bool invisible = entry.has(CharEntry::kInvisible);
      if (!is_first && !invisible && !entry.has(CharEntry::kStartsWithMark)) break;
      is_first = false;
      const char32_t c = Units::read(p_);
      const std::uint32_t source = source_++;
      if (invisible) continue;
      const Mapping parts = decompose(c);
      for (std::size_t k = 0; k < parts.size; ++k) {
        if (combining_class(parts.chars[k]) != 0) {
          marks_.add(parts.chars[k], k == 0, source);
        } else {
          marks_.finish(last_source_, append);
          append(parts.chars[k], source);
        }
      }
    }
    marks_.finish(last_source_, append);
  }

  void append_classified(char32_t c, std::uint32_t source) {
    const CharClass type = classify(c);
    if (type != CharClass::kWord) close_word();
    if (type == CharClass::kSpace) return;
    append_char(c, source);
    if (type == CharClass::kPunctuation) close_word();
  }

  // One code point more for the present word.
  void append_char(char32_t c, std::uint32_t source) {
    spans_.starts[spans_.num_starts] = spans_.size;
    spans_.num_starts = spans_.num_lasts + 1;
    const std::size_t size = encode_utf8(c, spans_.text + spans_.size);
    if (c == 0) spans_.text[spans_.size] = kNulByte;
    if constexpr (kOffsets) std::fill_n(area_.sources.data() + spans_.size, size, source);
    spans_.size += static_cast<std::uint32_t>(size);
  }

  void close_word() {
    spans_.lasts[spans_.num_lasts] = spans_.size - 1;
    spans_.num_lasts = spans_.num_starts;
  }

  // A word of its own, which is the token `id`. One byte of text stands for it, so that it has a source.
  void isolate(std::uint32_t id, std::uint32_t source) {
    close_word();
    ++spans_.num_literals;
    spans_.starts[spans_.num_starts++] = id | WordSpans::kLiteral;
    spans_.lasts[spans_.num_lasts++] = spans_.size;
    if constexpr (kOffsets) area_.sources[spans_.size] = source;
    ++spans_.size;
  }

  // Looks up all words that are closed and makes room for what follows; an open word moves to the front.
  void look_up() {
    sink_.words(rules_.kernels, spans_, area_.sources.data(), area_.found);
    spans_.num_literals = 0;
    if (!spans_.is_open()) {
      spans_.size = spans_.num_starts = spans_.num_lasts = 0;
      return;
    }
    const std::uint32_t start = spans_.starts[spans_.num_lasts];
    std::size_t size = spans_.size - start;
    std::memmove(spans_.text, spans_.text + start, size);
    if constexpr (kOffsets) {
      std::memmove(area_.sources.data(), area_.sources.data() + start, size * sizeof(std::uint32_t));
    }
    // Of a word that is too long for any token no more is kept than shows this, and where it ends.
    const std::size_t too_long = 4 * rules_.max_word_chars + 2;  // bytes: more code points; a first and a last one
    if (size > too_long) {
      if constexpr (kOffsets) area_.sources[too_long - 1] = area_.sources[size - 1];
      size = too_long;
    }
    if (size > area_.capacity / 2) grow();
    spans_.starts[0] = 0;
    spans_.num_starts = 1;
    spans_.num_lasts = 0;
    spans_.size = static_cast<std::uint32_t>(size);
  }

  void grow() {
    area_.grow(2 * area_.capacity);
    spans_.text = area_.text.data();
    spans_.starts = area_.starts.data();
    spans_.lasts = area_.lasts.data();
  }

  const TextRules& rules_;
  WorkArea& area_;
  MarkRun& marks_;
  WordSink<kOffsets>& sink_;
  WordSpans spans_;

  const Unit* p_ = nullptr;
  const Unit* end_ = nullptr;
  std::uint32_t source_ = 0;  // of the code point at p_
  std::uint32_t last_source_ = 0;
};

}  // namespace bert_fast::wordpiece
