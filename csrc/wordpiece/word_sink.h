// From words to tokens: looks words up and writes ids, offsets and word ids to the caller's vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "wordpiece/buffer.h"
#include "wordpiece/vocab.h"

namespace bert_fast::wordpiece {

// Tokens of one or more texts, one after the other. offsets: start and stop of each token, in code points of its text.
struct Tokens {
  Buffer<std::int32_t> ids;
  Buffer<std::int32_t> offsets;   // empty unless asked for, else 2 per token
  Buffer<std::int32_t> word_ids;  // empty unless asked for, else 1 per token
};

// Where the bytes of a word come from: code point indices of the original text.
struct ContiguousSources {  // every byte is a code point, and none was removed between them
  std::uint32_t first;
  std::uint32_t operator[](std::size_t byte) const { return first + static_cast<std::uint32_t>(byte); }
};

template <bool kOffsets>
class WordSink {
 public:
  WordSink(const Vocab& vocab, std::int32_t unk_id, bool word_ids, Tokens& out)
      : vocab_(vocab), unk_id_(unk_id), word_ids_(word_ids), out_(out) {}

  // One word that is the token `id` as a whole; sources: of its first and last code point.
  void token(std::int32_t id, std::uint32_t first_source, std::uint32_t last_source) {
    out_.ids.push_back(id);
    if constexpr (kOffsets) push_offsets(first_source, last_source);
    finish_word(1);
  }
  void unknown(std::uint32_t first_source, std::uint32_t last_source) { token(unk_id_, first_source, last_source); }

  // A word of at most WordKey::kMaxBytes bytes; `word` points at the bytes that the key was made of.
  template <typename Sources>
  void short_word(const WordKey& key, std::string_view word, const Sources& sources) {
    const std::int32_t id = vocab_.find_short_word(key);
    if (id < 0) {
      long_word(word, sources);
    } else if constexpr (kOffsets) {
      token(id, sources[0], sources[word.size() - 1]);
    } else {
      token(id, 0, 0);
    }
  }

  // A word of any length. sources[i]: of the code point that byte i belongs to (used with kOffsets only).
  template <typename Sources>
  void long_word(std::string_view word, const Sources& sources) {
    const std::size_t first = out_.ids.size();
    if (!vocab_.match_word(word, out_.ids)) {
      if constexpr (kOffsets) {
        unknown(sources[0], sources[word.size() - 1]);
      } else {
        unknown(0, 0);
      }
      return;
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

 private:
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
  const bool word_ids_;
  std::int32_t next_word_id_ = 0;
  Tokens& out_;
};

}  // namespace bert_fast::wordpiece
