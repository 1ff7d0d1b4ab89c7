// The unigram language model (Kudo 2018, arXiv:1804.10959): of all ways to cut a word into pieces of the vocabulary the
// one with the greatest sum of scores, found by dynamic programming over the places between characters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/trie.h"

namespace bert_fast::unigram {

struct ModelOptions {
  std::int32_t unk_id = 0;
  bool byte_fallback =
      false;  // pieces that are not in the vocabulary become the tokens <0x00> to <0xFF> of their bytes
};

class Model {
 public:
  // One token of a word: bytes [start, stop) of it.
  struct Piece {
    std::int32_t id;
    std::uint32_t start;
    std::uint32_t stop;
  };
  // Memory that is reused from word to word.
  struct Lattice {
    struct Node {
      double score;
      std::uint32_t start;  // of the best piece that ends here
      std::int32_t number;  // of that piece; kUnknown
    };
    std::vector<Node> nodes;
    std::vector<Piece> pieces;
  };

  // `vocab` (UTF-8) is needed during construction only. Throws std::invalid_argument.
  Model(const std::vector<std::string_view>& vocab, const std::vector<double>& scores, const ModelOptions& options);

  // The tokens of a word of valid UTF-8, in lattice.pieces. Of two ways with equal scores the one found first stays:
  // that whose last piece starts further to the left. Unknown characters side by side are one token.
  void split(std::string_view word, Lattice& lattice) const;

 private:
  void emit(std::string_view word, std::uint32_t start, std::uint32_t stop, std::vector<Piece>& pieces) const;

  static constexpr std::int32_t kUnknown = -1;

  // Pieces have numbers in the order in which they lie in the trie: what a walk reads of them lies together, and few
  // lines of the cache hold it, however large the vocabulary is.
  wordpiece::Trie trie_;
  std::vector<std::int32_t> byte_ids_;  // -1: the vocabulary has no such token; empty without byte_fallback
  std::vector<std::int32_t> ids_;       // by number
  std::vector<double> scores_;          // by number
  double unk_score_;
  std::int32_t unk_id_;
};

}  // namespace bert_fast::unigram
