#include "wordpiece/vocab.h"

#include <algorithm>
#include <stdexcept>

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

// Both lists in ascending order: tokens that share a prefix are sorted as what follows it is.
struct Vocab::Entries {
  std::vector<Trie::Entry> starting;
  std::vector<Trie::Entry> continuing;

  Entries(const std::vector<std::string_view>& tokens, std::string_view prefix, std::size_t max_word_chars) {
    const auto add = [&](std::vector<Trie::Entry>& list, std::string_view text, std::uint32_t id) {
      // Tokens that no word can be long enough for are left out: failure pops grow with the square of a token's length.
      if (text.empty() || count_code_points(text) > max_word_chars) return;
      list.push_back({text, static_cast<std::int32_t>(id)});
    };
    starting.reserve(tokens.size());
    for (const std::uint32_t id : sort_tokens(tokens)) {
      add(starting, tokens[id], id);
      if (tokens[id].substr(0, prefix.size()) == prefix) add(continuing, tokens[id].substr(prefix.size()), id);
    }
  }

  std::size_t count_words(std::size_t min_bytes, std::size_t max_bytes) const {
    const auto fits = [&](const Trie::Entry& e) { return e.text.size() >= min_bytes && e.text.size() <= max_bytes; };
    return static_cast<std::size_t>(std::count_if(starting.begin(), starting.end(), fits));
  }
};

template <typename Key>
WordTable::Slots<Key>::Slots(std::size_t num_words) {
  int bits = 4;
  while ((std::size_t{1} << bits) < 2 * num_words) ++bits;
  slots.resize(std::size_t{1} << bits);
  shift = 64 - bits;
  mask = slots.size() - 1;
}

template <typename Key>
void WordTable::Slots<Key>::insert(const Key& key, std::int32_t id) {
  std::size_t i = hash(key) >> shift;
  while (slots[i].id >= 0) i = (i + 1) & mask;
  slots[i] = {key, id};
}

WordTable::WordTable(std::size_t num_small, std::size_t num_large) : small_(num_small), large_(num_large) {}

void WordTable::insert(const WordKey& key, std::int32_t id) {
  if (is_small(key)) {
    small_.insert(fold(key), id);
  } else {
    large_.insert(key, id);
  }
}

Vocab::Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix,
             std::size_t max_word_chars)
    : Vocab(Entries(tokens, continuing_prefix, max_word_chars), tokens, continuing_prefix.size()) {}

Vocab::Vocab(Entries&& entries, const std::vector<std::string_view>& tokens, std::size_t prefix_bytes)
    : words_(entries.count_words(1, WordTable::kSmallBytes),
             entries.count_words(WordTable::kSmallBytes + 1, WordKey::kMaxBytes)),
      trie_(entries.starting, entries.continuing),
      prefix_bytes_(prefix_bytes) {
  // By id, which is roughly by frequency: common words get the places where the search for them begins.
  std::sort(entries.starting.begin(), entries.starting.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  for (const Trie::Entry& entry : entries.starting) {
    if (entry.text.size() > WordKey::kMaxBytes) continue;
    char bytes[16] = {};
    std::memcpy(bytes, entry.text.data(), entry.text.size());
    words_.insert(WordKey::read(bytes, entry.text.size()), entry.id);
  }
  token_bytes_.reserve(tokens.size());
  for (const std::string_view token : tokens) token_bytes_.push_back(static_cast<std::uint32_t>(token.size()));
}

std::int32_t Vocab::find_token(const std::vector<std::string_view>& tokens, std::string_view token) {
  const auto found = std::find(tokens.begin(), tokens.end(), token);
  return found == tokens.end() ? -1 : static_cast<std::int32_t>(found - tokens.begin());
}

}  // namespace bert_fast::wordpiece
