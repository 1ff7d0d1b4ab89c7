#include "wordpiece/added_tokens.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {
namespace {

std::vector<AddedToken> without_repeats(std::vector<AddedToken> tokens) {
  std::unordered_set<std::string> seen;
  std::vector<AddedToken> kept;
  for (AddedToken& token : tokens) {
    if (!token.content.empty() && seen.insert(token.content).second) kept.push_back(std::move(token));
  }
  return kept;
}

Trie make_trie(const std::vector<AddedToken>& tokens) {
  std::vector<Trie::Entry> entries;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    entries.push_back({tokens[i].content, static_cast<std::int32_t>(i)});
  }
  return Trie(std::move(entries), {});
}

// The code point in front of `position`, where its first byte is in `start`.
char32_t code_point_before(std::string_view text, std::size_t position, std::size_t& start) {
  start = position - 1;
  while ((static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  const char* p = text.data() + start;
  return decode_utf8(p);
}

char32_t code_point_at(std::string_view text, std::size_t position) {
  const char* p = text.data() + position;
  return decode_utf8(p);
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens)
    : tokens_(without_repeats(std::move(tokens))), trie_(make_trie(tokens_)) {
  for (const AddedToken& token : tokens_) starts_token_[static_cast<unsigned char>(token.content[0])] = true;
  num_first_bytes_ = static_cast<int>(std::count(starts_token_.begin(), starts_token_.end(), true));
}

std::size_t AddedTokenFinder::next_candidate(std::string_view text, std::size_t from) const {
  if (num_first_bytes_ == 1) {  // the usual case: every special token starts with '['
    const void* found = std::memchr(text.data() + from, tokens_[0].content[0], text.size() - from);
    return found == nullptr ? text.size() : static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
  }
  while (from < text.size() && !starts_token_[static_cast<unsigned char>(text[from])]) ++from;
  return from;
}

std::optional<AddedTokenFinder::Match> AddedTokenFinder::find(std::string_view text, std::size_t from) const {
  if (tokens_.empty()) return std::nullopt;
  for (; from < text.size(); ++from) {
    from = next_candidate(text, from);
    std::int32_t token = 0;
    const std::size_t length = trie_.longest_prefix(text.substr(from), token);
    if (length != 0) return Match{from, from + length, static_cast<std::size_t>(token)};
  }
  return std::nullopt;
}

std::optional<AddedTokenFinder::Piece> AddedTokenFinder::accept(std::string_view text, const Match& match,
                                                                std::size_t done, Run& whitespace) const {
  const AddedToken& token = tokens_[match.token];
  Piece piece{match.start, match.stop, token.id};
  std::size_t before = 0;
  if (token.single_word) {
    if (piece.start > 0 && is_word_character(code_point_before(text, piece.start, before))) return std::nullopt;
    if (piece.stop < text.size() && is_word_character(code_point_at(text, piece.stop))) return std::nullopt;
  }
  if (token.lstrip) {
    while (piece.start > done && is_whitespace(code_point_before(text, piece.start, before))) piece.start = before;
    piece.start = std::max(piece.start, done);
  }
  if (token.rstrip) {
    if (piece.stop < whitespace.start || piece.stop > whitespace.stop) {
      std::size_t stop = piece.stop;
      while (stop < text.size() && is_whitespace(code_point_at(text, stop))) {
        stop += utf8_length(static_cast<unsigned char>(text[stop]));
      }
      whitespace = {piece.stop, stop};
    }
    piece.stop = whitespace.stop;
  }
  if (piece.start >= piece.stop) return std::nullopt;  // whitespace that the token before has taken already
  return piece;
}

}  // namespace bert_fast::wordpiece
