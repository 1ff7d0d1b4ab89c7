// Added and special tokens inside a text: found before the text is split into words.
#pragma once

#include <algorithm>
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

  // False only if no token starts in the text, which may be of any width.
  template <typename Unit>
  bool may_occur(const Unit* text, std::size_t size) const {
    if (tokens_.empty()) return false;
    if (num_first_bytes_ != 1 || static_cast<unsigned char>(tokens_[0].content[0]) >= 0x80) return true;
    const auto first = static_cast<Unit>(tokens_[0].content[0]);  // the usual case: all start with '['
    constexpr std::size_t kStep = 32;
    std::size_t i = 0;
    for (; i + kStep <= size; i += kStep) {
      Unit any = 0;
      for (std::size_t k = 0; k < kStep; ++k) any = static_cast<Unit>(any | (text[i + k] == first));
      if (any != 0) return true;
    }
    return std::find(text + i, text + size, first) != text + size;
  }

  // Cuts the text: leftmost match first, the longest of those; matches do not overlap. Calls piece(Piece) in order,
  // never for an empty piece. (Whitespace taken by rstrip can be taken once more by a token that starts with it.)
  template <typename Function>
  void split(std::string_view text, Function piece) const {
    std::size_t done = 0;
    Run whitespace;
    for (std::size_t from = 0; const std::optional<Match> match = find(text, from);) {
      from = match->stop;
      const std::optional<Piece> token = accept(text, *match, done, whitespace);
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
  // Whitespace behind a token, up to where it ends: many tokens may take it, one after the other.
  struct Run {
    std::size_t start = 1;
    std::size_t stop = 0;
  };
  std::optional<Match> find(std::string_view text, std::size_t from) const;
  std::optional<Piece> accept(std::string_view text, const Match& match, std::size_t done, Run& whitespace) const;
  std::size_t next_candidate(std::string_view text, std::size_t from) const;

  std::vector<AddedToken> tokens_;
  Trie trie_;  // its ids are positions in tokens_
  std::array<bool, 256> starts_token_{};
  int num_first_bytes_ = 0;
};

}  // namespace bert_fast::wordpiece
