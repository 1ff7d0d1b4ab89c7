// From words to tokens: looks words up and writes ids, offsets and word ids to the caller's buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "wordpiece/buffer.h"
#include "wordpiece/kernels.h"
#include "wordpiece/utf8.h"
#include "wordpiece/vocab.h"

namespace bert_fast::wordpiece {

// Tokens of one or more texts, one after the other. offsets: start and stop of each token, in code points of its text.
struct Tokens {
  Buffer<std::int32_t> ids;
  Buffer<std::int32_t> offsets;   // empty unless asked for, else 2 per token
  Buffer<std::int32_t> word_ids;  // empty unless asked for, else 1 per token
};

// What a look-up of many words needs room for.
struct FoundWords {
  Buffer<std::int32_t> ids;
  Buffer<std::uint32_t> misses;
};

template <bool kOffsets>
class WordSink {
 public:
  WordSink(const Vocab& vocab, std::int32_t unk_id, std::size_t max_word_chars, bool word_ids, Tokens& out)
      : vocab_(vocab), unk_id_(unk_id), max_word_chars_(max_word_chars), word_ids_(word_ids), out_(out) {}

  // One word that is the token `id` as a whole; sources: of its first and last code point.
  void token(std::int32_t id, std::uint32_t first_source, std::uint32_t last_source) {
    out_.ids.push_back(id);
    if constexpr (kOffsets) push_offsets(first_source, last_source);
    finish_word(1);
  }

  // One word. sources[i]: the code point of the original text that byte i belongs to (used with kOffsets only).
  void word(std::string_view word, const std::uint32_t* sources) {
    const std::size_t first = out_.ids.size();
    const bool too_long = word.size() > max_word_chars_ && count_code_points(word) > max_word_chars_;
    if (too_long || !vocab_.match_word(word, out_.ids)) {
      return token(unk_id_, kOffsets ? sources[0] : 0, kOffsets ? sources[word.size() - 1] : 0);
    }
    if constexpr (kOffsets) {
      std::size_t begin = 0;
      for (std::size_t i = first; i < out_.ids.size(); ++i) {
        const std::int32_t id = out_.ids[i];
        const std::size_t end = begin + (i == first ? vocab_.first_piece_bytes(id) : vocab_.next_piece_bytes(id));
        push_offsets(sources[begin], sources[end - 1]);
        begin = end;
      }
    }
    finish_word(out_.ids.size() - first);
  }

  // All words whose ends are known. sources: of each byte of spans.text.
  void words(const Kernels& kernels, const WordSpans& spans, const std::uint32_t* sources, FoundWords& found) {
    const std::size_t count = spans.num_lasts;
    found.ids.clear();
    found.misses.clear();
    std::int32_t* const ids = found.ids.room(count + kCopied);
    std::uint32_t* const misses = found.misses.room(count + 1);
    const std::size_t num_misses = kernels.find(vocab_.words().view(), spans, count, ids, misses);
    std::size_t next = 0;
    for (std::size_t k = 0; k < num_misses; ++k) {
      const std::size_t miss = misses[k];
      hits(spans, next, miss, ids, sources);
      const std::uint32_t start = spans.starts[miss];
      word({spans.text + start, spans.lasts[miss] + 1 - start}, sources + (kOffsets ? start : 0));
      next = miss + 1;
    }
    hits(spans, next, count, ids, sources);
  }

  std::size_t num_tokens() const { return out_.ids.size(); }

 private:
  static constexpr std::size_t kCopied = 16;  // ids are copied so many at a time, some of them for nothing

  // The words [first, last), each of which is one token.
  void hits(const WordSpans& spans, std::size_t first, std::size_t last, const std::int32_t* ids,
            const std::uint32_t* sources) {
    const std::size_t count = last - first;
    std::int32_t* const to = out_.ids.room(count + kCopied);
    for (std::size_t i = 0; i < count; i += kCopied) std::memcpy(to + i, ids + first + i, sizeof(*to) * kCopied);
    out_.ids.commit(count);
    if constexpr (kOffsets) {
      std::int32_t* const offsets = out_.offsets.room(2 * count);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t start = spans.starts[first + i], end = spans.lasts[first + i];
        offsets[2 * i] = static_cast<std::int32_t>(sources[(start & WordSpans::kLiteral) != 0 ? end : start]);
        offsets[2 * i + 1] = static_cast<std::int32_t>(sources[end] + 1);
      }
      out_.offsets.commit(2 * count);
    }
    if (word_ids_) {
      std::int32_t* const word_ids = out_.word_ids.room(count);
      for (std::size_t i = 0; i < count; ++i) word_ids[i] = next_word_id_ + static_cast<std::int32_t>(i);
      out_.word_ids.commit(count);
      next_word_id_ += static_cast<std::int32_t>(count);
    }
  }

  void push_offsets(std::uint32_t first_source, std::uint32_t last_source) {
    out_.offsets.push_back(static_cast<std::int32_t>(first_source));
    out_.offsets.push_back(static_cast<std::int32_t>(last_source + 1));
  }
  void finish_word(std::size_t num_tokens) {
    if (!word_ids_) return;
    out_.word_ids.append(num_tokens, next_word_id_);
    ++next_word_id_;
  }

  const Vocab& vocab_;
  const std::int32_t unk_id_;
  const std::size_t max_word_chars_;
  const bool word_ids_;
  std::int32_t next_word_id_ = 0;
  Tokens& out_;
};

}  // namespace bert_fast::wordpiece
