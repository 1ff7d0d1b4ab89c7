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
  Buffer<UnsplitWord> unsplit;
  Buffer<std::int32_t> piece_ids;  // by place in the text
  Buffer<std::uint32_t> piece_sizes;

  // For texts and numbers of words up to `size`.
  PieceSpans pieces(std::size_t size) {
    piece_ids.reserve(size);
    piece_sizes.reserve(size);
    return {piece_ids.data(), piece_sizes.data()};
  }
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

  // One word; a byte behind it is readable. sources[i]: the code point of the original text that byte i belongs to
  // (used with kOffsets only).
  void word(const Kernels& kernels, std::string_view word, const std::uint32_t* sources, FoundWords& found) {
    const PieceSpans pieces = found.pieces(word.size() + 1);
    const UnsplitWord unsplit = {0, static_cast<std::uint32_t>(word.size())};
    pieces.ids[0] = PieceSpans::kUnknown;
    if (!is_too_long(word)) vocab_.split(kernels, word.data(), &unsplit, 1, pieces);
    split_word(unsplit.start, unsplit.end, pieces, sources);
  }

  // All words whose ends are known. sources: of each byte of spans.text.
  void words(const Kernels& kernels, const WordSpans& spans, const std::uint32_t* sources, FoundWords& found) {
    const std::size_t count = spans.num_lasts;
    found.ids.reserve(count + kCopied);
    found.misses.reserve(count + 1);
    const std::int32_t* const ids = found.ids.data();
    const std::uint32_t* const misses = found.misses.data();
    const std::size_t num_misses =
        kernels.words().find(vocab_.words().view(), spans, count, found.ids.data(), found.misses.data());

    found.unsplit.reserve(num_misses + 1);
    const PieceSpans pieces = found.pieces(spans.size + 1);
    std::size_t num_unsplit = 0;
    for (std::size_t k = 0; k < num_misses; ++k) {
      const std::uint32_t start = spans.starts[misses[k]], end = spans.lasts[misses[k]] + 1;
      found.unsplit.data()[num_unsplit] = {start, end};
      const bool too_long = is_too_long({spans.text + start, end - start});
      if (too_long) pieces.ids[start] = PieceSpans::kUnknown;
      num_unsplit += !too_long;
    }
    vocab_.split(kernels, spans.text, found.unsplit.data(), num_unsplit, pieces);

    std::size_t next = 0;
    for (std::size_t k = 0; k < num_misses; ++k) {
      const std::size_t miss = misses[k];
      hits(spans, next, miss, ids, sources);
      const std::uint32_t start = spans.starts[miss], end = spans.lasts[miss] + 1;
      split_word(start, end, pieces, sources);
      next = miss + 1;
    }
    hits(spans, next, count, ids, sources);
  }

  std::size_t num_tokens() const { return out_.ids.size(); }

 private:
  static constexpr std::size_t kCopied = 16;  // ids are copied so many at a time, some of them for nothing

  bool is_too_long(std::string_view word) const {
    return word.size() > max_word_chars_ && count_code_points(word) > max_word_chars_;
  }

  // The word text[start .. end), whose pieces are known.
  void split_word(std::uint32_t start, std::uint32_t end, const PieceSpans& pieces, const std::uint32_t* sources) {
    if (pieces.ids[start] == PieceSpans::kUnknown) {
      return token(unk_id_, kOffsets ? sources[start] : 0, kOffsets ? sources[end - 1] : 0);
    }
    const std::size_t before = out_.ids.size();
    std::int32_t* const ids = out_.ids.room(end - start);
    std::size_t count = 0;
    for (std::uint32_t p = start; p < end; p += pieces.sizes[p]) {
      ids[count++] = pieces.ids[p];
      if constexpr (kOffsets) push_offsets(sources[p], sources[p + pieces.sizes[p] - 1]);
    }
    out_.ids.commit(count);
    finish_word(out_.ids.size() - before);
  }

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
