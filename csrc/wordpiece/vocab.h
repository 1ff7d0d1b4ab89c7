// The vocabulary: what a normalized word becomes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/trie.h"
#include "wordpiece/word_table.h"

namespace bert_fast::wordpiece {

// Stands for NUL in words: the table pads with NUL, and UTF-8 has no such byte.
constexpr char kNulByte = '\xFE';

class Vocab {
 public:
  // Ids are positions; the strings are needed during construction only. Words longer than max_word_chars code points
  // will not be asked for. Throws std::invalid_argument that names both positions of a token that occurs twice.
  Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix, std::size_t max_word_chars);

  // The id of a token by its own spelling, or -1. Slow: a scan.
  static std::int32_t find_token(const std::vector<std::string_view>& tokens, std::string_view token);

  // Words that are one token. In words NUL is kNulByte.
  const WordTable& words() const { return words_; }

  // Appends the pieces of a word, longest match first; false (and nothing appended) if it has none.
  bool match_word(std::string_view word, Buffer<std::int32_t>& ids) const { return trie_.match_word(word, ids); }

  // How many bytes of a word the token takes as its first piece, and as a further one.
  std::size_t first_piece_bytes(std::int32_t id) const { return token_bytes_[static_cast<std::size_t>(id)]; }
  std::size_t next_piece_bytes(std::int32_t id) const { return first_piece_bytes(id) - prefix_bytes_; }

 private:
  struct Entries;
  Vocab(Entries&& entries, const std::vector<std::string_view>& tokens, std::size_t prefix_bytes);

  WordTable words_;
  Trie trie_;
  std::vector<std::uint32_t> token_bytes_;
  std::size_t prefix_bytes_;
};

}  // namespace bert_fast::wordpiece
