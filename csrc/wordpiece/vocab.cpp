#include "wordpiece/vocab.h"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <utility>

#include "wordpiece/unicode.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {
namespace {

[[noreturn]] void refuse(const std::vector<std::string_view>& tokens, std::size_t first, std::size_t second) {
  throw std::invalid_argument("vocab: expected distinct tokens, got '" + std::string(tokens[first]) +
                              "' at positions " + std::to_string(first) + " and " + std::to_string(second));
}

}  // namespace

struct Vocab::Entries {
  std::vector<WordTable::Entry> words;
  std::vector<Trie::Entry> starting;
  std::vector<Trie::Entry> continuing;
  std::vector<std::size_t> unused;   // tokens that no word can contain
  std::deque<std::string> replaced;  // tokens with kNulByte

  Entries(const std::vector<std::string_view>& tokens, std::string_view prefix, std::size_t max_word_chars) {
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
      bool continues = token.substr(0, prefix.size()) == prefix;
      const bool starts = !(continues && prefix_splits && token.size() > 1) && fits(token);
      continues = continues && fits(token.substr(prefix.size()));
      if (!starts && !continues) unused.push_back(id);
      if (continues) continuing.push_back({token.substr(prefix.size()), static_cast<std::int32_t>(id)});
      if (starts) starting.push_back({token, static_cast<std::int32_t>(id)});
      if (starts && token.size() <= WordKey::kMaxBytes) words.push_back({token, static_cast<std::uint32_t>(id)});
    }
    std::sort(unused.begin(), unused.end(),
              [&](std::size_t a, std::size_t b) { return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : a < b; });
    for (std::size_t i = 1; i < unused.size(); ++i) {
      if (tokens[unused[i]] == tokens[unused[i - 1]]) refuse(tokens, unused[i - 1], unused[i]);
    }
  }

  std::string_view without_nul(std::string_view token) {
    if (token.find('\0') == std::string_view::npos) return token;
    replaced.emplace_back(token);
    std::replace(replaced.back().begin(), replaced.back().end(), '\0', kNulByte);
    return replaced.back();
  }
};

Vocab::Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix,
             std::size_t max_word_chars) try
    : Vocab(Entries(tokens, continuing_prefix, max_word_chars), tokens.size()) {
} catch (const Trie::Duplicate& duplicate) {
  refuse(tokens, static_cast<std::size_t>(duplicate.first_id), static_cast<std::size_t>(duplicate.second_id));
}

Vocab::Vocab(Entries&& entries, std::size_t num_tokens)
    : trie_(std::move(entries.starting), std::move(entries.continuing)), words_(entries.words, num_tokens) {}

std::int32_t Vocab::find_token(const std::vector<std::string_view>& tokens, std::string_view token) {
  const auto found = std::find(tokens.begin(), tokens.end(), token);
  return found == tokens.end() ? -1 : static_cast<std::int32_t>(found - tokens.begin());
}

}  // namespace bert_fast::wordpiece
