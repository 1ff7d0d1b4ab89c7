#include "wordpiece/vocab.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {
namespace {

// Throws if two tokens are equal.
void check_distinct(const std::vector<std::string_view>& tokens) {
  std::size_t mask = 15;
  while (mask < 2 * tokens.size()) mask = 2 * mask + 1;
  std::vector<std::uint32_t> slots(mask + 1, 0);  // position + 1
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    std::uint64_t hash = token.size();
    for (std::size_t k = 0; k < token.size(); k += 8) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, token.data() + k, std::min<std::size_t>(8, token.size() - k));
      hash = (hash ^ bytes) * 0x9E3779B97F4A7C15ULL;
      hash ^= hash >> 29;
    }
    std::size_t slot = hash & mask;
    for (; slots[slot] != 0; slot = (slot + 1) & mask) {
      if (tokens[slots[slot] - 1] != token) continue;
      throw std::invalid_argument("vocab: expected distinct tokens, got '" + std::string(token) + "' at positions " +
                                  std::to_string(slots[slot] - 1) + " and " + std::to_string(i));
    }
    slots[slot] = static_cast<std::uint32_t>(i + 1);
  }
}

}  // namespace

struct Vocab::Entries {
  std::vector<WordTable::Entry> words;
  std::vector<Trie::Entry> starting;
  std::vector<Trie::Entry> continuing;
  std::deque<std::string> replaced;  // tokens with kNulByte

  Entries(const std::vector<std::string_view>& tokens, std::string_view prefix, std::size_t max_word_chars) {
    check_distinct(tokens);
    starting.reserve(tokens.size());
    words.reserve(tokens.size());
    // Where the prefix starts with punctuation, as "##" does, a token that has it cannot start a word: this character
    // is a word of its own.
    const bool prefix_splits = !prefix.empty() && static_cast<unsigned char>(prefix[0]) < 0x80 &&
                               is_punctuation(static_cast<unsigned char>(prefix[0]));
    const auto fits = [&](std::string_view text) {  // a word that may be asked for
      return !text.empty() && (text.size() <= max_word_chars || count_code_points(text) <= max_word_chars);
    };
    for (std::size_t id = 0; id < tokens.size(); ++id) {
      const std::string_view token = without_nul(tokens[id]);
      const bool continues = token.substr(0, prefix.size()) == prefix;
      if (continues && fits(token.substr(prefix.size()))) {
        continuing.push_back({token.substr(prefix.size()), static_cast<std::int32_t>(id)});
      }
      if ((continues && prefix_splits && token.size() > 1) || !fits(token)) continue;
      starting.push_back({token, static_cast<std::int32_t>(id)});
      if (token.size() <= WordKey::kMaxBytes) words.push_back({token, static_cast<std::uint32_t>(id)});
    }
  }

  std::string_view without_nul(std::string_view token) {
    if (std::memchr(token.data(), 0, token.size()) == nullptr) return token;
    replaced.emplace_back(token);
    std::replace(replaced.back().begin(), replaced.back().end(), '\0', kNulByte);
    return replaced.back();
  }
};

Vocab::Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix,
             std::size_t max_word_chars)
    : Vocab(Entries(tokens, continuing_prefix, max_word_chars), tokens.size()) {}

Vocab::Vocab(Entries&& entries, std::size_t num_tokens)
    : words_(entries.words, num_tokens), trie_(std::move(entries.starting), std::move(entries.continuing)) {}

std::int32_t Vocab::find_token(const std::vector<std::string_view>& tokens, std::string_view token) {
  const auto found = std::find(tokens.begin(), tokens.end(), token);
  return found == tokens.end() ? -1 : static_cast<std::int32_t>(found - tokens.begin());
}

}  // namespace bert_fast::wordpiece
