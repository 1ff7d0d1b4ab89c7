// Added and special tokens inside a text: found before the text is split into words.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/trie.h"

namespace bert_fast::wordpiece {

struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool single_word = false;  // not beside a word character
  bool lstrip = false;       // takes the whitespace in front of it
  bool rstrip = false;       // takes the whitespace behind it
  bool normalized = false;   // is looked for in the normalized text, in its own normalized form
};

class AddedTokenFinder {
 public:
  struct Piece {
    std::size_t start = 0;  // bytes
    std::size_t stop = 0;
    std::int32_t id = -1;  // -1: text between added tokens
  };

  // Of equal contents the first counts; empty ones are ignored.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Cuts the text: leftmost match first, the longest of those; matches do not overlap. Calls piece(Piece) in order,
  // never for an empty piece. (Whitespace taken by rstrip can be taken once more by a token that starts with it.)
  template <typename Function>
  void split(std::string_view text, Function piece) const {
    std::size_t done = 0;
    for (std::size_t from = 0; const std::optional<Match> match = find(text, from);) {
      from = match->stop;
      const std::optional<Piece> token = accept(text, *match, done);
      if (!token) continue;
      if (done < token->start) piece(Piece{done, token->start, -1});
      piece(*token);
      done = token->stop;
    }
    if (done < text.size()) piece(Piece{done, text.size(), -1});
  }

 private:
  struct Match {
    std::size_t start;
    std::size_t stop;
    std::size_t token;
  };
  struct Index;
  std::optional<Match> find(std::string_view text, std::size_t from) const;
  std::optional<Piece> accept(std::string_view text, const Match& match, std::size_t done) const;
  std::size_t next_candidate(std::string_view text, std::size_t from) const;

  std::vector<AddedToken> tokens_;
  Trie trie_;  // its ids are positions in tokens_
  std::array<bool, 256> starts_token_{};
  int num_first_bytes_ = 0;
};

}  // namespace bert_fast::wordpiece
