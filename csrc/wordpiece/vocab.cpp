#include "wordpiece/vocab.h"

#include <algorithm>
#include <deque>
#include <stdexcept>

#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {

namespace {

// Positions of the tokens in the order of their bytes; throws if two are equal.
std::vector<std::uint32_t> sort_tokens(const std::vector<std::string_view>& tokens) {
  struct Item {
    std::uint64_t head;  // the first eight bytes as a number: decides most comparisons
    std::uint32_t position;
  };
  std::vector<Item> items(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::uint64_t head = 0;
    for (std::size_t k = 0; k < 8; ++k) {
      head = head << 8 | (k < tokens[i].size() ? static_cast<unsigned char>(tokens[i][k]) : 0U);
    }
    items[i] = {head, static_cast<std::uint32_t>(i)};
  }
  std::sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
    if (a.head != b.head) return a.head < b.head;
    const int compared = tokens[a.position].compare(tokens[b.position]);
    return compared != 0 ? compared < 0 : a.position < b.position;
  });
  std::vector<std::uint32_t> order(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    order[i] = items[i].position;
    if (i == 0 || items[i].head != items[i - 1].head || tokens[order[i]] != tokens[order[i - 1]]) continue;
    throw std::invalid_argument("vocab: expected distinct tokens, got '" + std::string(tokens[order[i]]) +
                                "' at positions " + std::to_string(order[i - 1]) + " and " + std::to_string(order[i]));
  }
  return order;
}

}  // namespace

// The lists of the trie in ascending order: tokens that share a prefix are sorted as what follows it is.
struct Vocab::Entries {
  std::vector<Trie::Entry> starting;
  std::vector<Trie::Entry> continuing;
  std::vector<WordTable::Entry> words;
  std::deque<std::string> replaced;  // tokens with kNulByte

  Entries(const std::vector<std::string_view>& tokens, std::string_view prefix, std::size_t max_word_chars) {
    starting.reserve(tokens.size());
    // A token like "##ing" is no word: its first character stands alone.
    const bool prefix_splits = !prefix.empty() && static_cast<unsigned char>(prefix[0]) < 0x80 &&
                               is_punctuation(static_cast<unsigned char>(prefix[0]));
    const std::vector<std::string_view> spelled = without_nul(tokens);
    for (const std::uint32_t id : sort_tokens(spelled)) {
      const std::string_view token = spelled[id];
      const bool continues = token.substr(0, prefix.size()) == prefix;
      // Tokens that no word can be long enough for are left out: failure pops grow with the square of a token's length.
      if (token.empty() || (token.size() > max_word_chars && count_code_points(token) > max_word_chars)) {
        if (!continues || count_code_points(token.substr(prefix.size())) > max_word_chars) continue;
      } else {
        starting.push_back({token, static_cast<std::int32_t>(id)});
        if (!(continues && prefix_splits && token.size() > 1)) words.push_back({token, id});
      }
      if (continues && token.size() > prefix.size()) {
        continuing.push_back({token.substr(prefix.size()), static_cast<std::int32_t>(id)});
      }
    }
  }

  std::vector<std::string_view> without_nul(std::vector<std::string_view> tokens) {
    for (std::string_view& token : tokens) {
      if (token.find('\0') == std::string_view::npos) continue;
      replaced.emplace_back(token);
      std::replace(replaced.back().begin(), replaced.back().end(), '\0', kNulByte);
      token = replaced.back();
    }
    return tokens;
  }
};

Vocab::Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix,
             std::size_t max_word_chars)
    : Vocab(Entries(tokens, continuing_prefix, max_word_chars), tokens, continuing_prefix.size()) {}

Vocab::Vocab(Entries&& entries, const std::vector<std::string_view>& tokens, std::size_t prefix_bytes)
    : words_(entries.words, tokens.size()), trie_(entries.starting, entries.continuing), prefix_bytes_(prefix_bytes) {
  token_bytes_.reserve(tokens.size());
  for (const std::string_view token : tokens) token_bytes_.push_back(static_cast<std::uint32_t>(token.size()));
}

std::int32_t Vocab::find_token(const std::vector<std::string_view>& tokens, std::string_view token) {
  const auto found = std::find(tokens.begin(), tokens.end(), token);
  return found == tokens.end() ? -1 : static_cast<std::int32_t>(found - tokens.begin());
}

}  // namespace bert_fast::wordpiece
