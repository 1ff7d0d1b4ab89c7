// The vocabulary: what a normalized word becomes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/kernels.h"
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

  // Words of at most WordKey::kMaxBytes bytes that are one token.
  const WordTable& words() const { return words_; }

  // Finds the pieces of words, longest match first (Wu et al. 2016, arXiv:1609.08144). NUL is kNulByte in words.
  void split(const Kernels& kernels, const char* text, const UnsplitWord* words, std::size_t count,
             const PieceSpans& pieces) const {
    kernels.words().split(trie_.view(), text, words, count, pieces);
  }

 private:
  struct Entries;
  Vocab(Entries&& entries, std::size_t num_tokens);

  Trie trie_;  // first: it finds duplicates
  WordTable words_;
};

}  // namespace bert_fast::wordpiece
