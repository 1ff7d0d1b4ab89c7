// The vocabulary: what a normalized word becomes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "wordpiece/trie.h"

namespace bert_fast::wordpiece {

// The bytes of a short word and their number, as two integers: equal keys mean equal words.
struct WordKey {
  static constexpr std::size_t kMaxBytes = 15;  // the sixteenth byte holds the length
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  // Of the first `size` <= kMaxBytes bytes at `p`, where 16 bytes are readable.
  static WordKey read(const char* p, std::size_t size);
  bool operator==(const WordKey& other) const { return low == other.low && high == other.high; }
};

// Whole short words -> ids: open addressing, one cache line per probe. 96 % of the words of English prose end here, and
// nine in ten of these have at most 7 bytes: they have slots of half the size, so that more of them stay in the cache.
class WordTable {
 public:
  static constexpr std::size_t kSmallBytes = 7;

  WordTable(std::size_t num_small, std::size_t num_large);  // words of up to kSmallBytes bytes, longer ones
  // Words inserted early are found with fewer probes.
  void insert(const WordKey& key, std::int32_t id);
  // The id of the word, or -1.
  std::int32_t find(const WordKey& key) const { return is_small(key) ? small_.find(fold(key)) : large_.find(key); }

 private:
  template <typename Key>
  struct alignas(2 * sizeof(Key)) Slot {
    Key key{};
    std::int32_t id = -1;
  };
  template <typename Key>
  struct Slots {
    explicit Slots(std::size_t num_words);
    void insert(const Key& key, std::int32_t id);
    std::int32_t find(const Key& key) const {
      for (std::size_t i = hash(key) >> shift;; i = (i + 1) & mask) {
        const Slot<Key>& slot = slots[i];
        if (slot.key == key) return slot.id;
        if (slot.id < 0) return -1;
      }
    }
    std::vector<Slot<Key>> slots;  // a power of two, at most half full
    int shift = 0;                 // the top bits of the hash number the slots
    std::size_t mask = 0;
  };

  static bool is_small(const WordKey& key) { return key.high >> 56 <= kSmallBytes; }
  // Of a small word: its bytes below, its length above.
  static std::uint64_t fold(const WordKey& key) { return key.low | key.high; }
  static std::uint64_t hash(std::uint64_t key) {
    // Multiplication spreads low bits upwards only, hence the fold before the second one.
    std::uint64_t h = key * 0xD6E8FEB86659FD93ULL;
    h ^= h >> 32;
    return h * 0xD6E8FEB86659FD93ULL;
  }
  static std::uint64_t hash(const WordKey& key) { return hash(key.low ^ (key.high * 0x9E3779B97F4A7C15ULL)); }

  Slots<std::uint64_t> small_;
  Slots<WordKey> large_;
};

class Vocab {
 public:
  // Ids are positions; the strings are needed during construction only. Words longer than max_word_chars code points
  // will not be asked for. Throws std::invalid_argument that names both positions of a token that occurs twice.
  Vocab(const std::vector<std::string_view>& tokens, std::string_view continuing_prefix, std::size_t max_word_chars);

  // The id of a token by its own spelling, or -1. Slow: a scan.
  static std::int32_t find_token(const std::vector<std::string_view>& tokens, std::string_view token);

  // The id of a word that is one token, at most WordKey::kMaxBytes long; -1 if there is none.
  std::int32_t find_short_word(const WordKey& key) const { return words_.find(key); }

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

inline WordKey WordKey::read(const char* p, std::size_t size) {
  WordKey key;
  std::memcpy(&key.low, p, 8);
  std::memcpy(&key.high, p + 8, 8);
  // The two masks that keep `size` bytes of 16, without a branch.
  const std::size_t low_bits = size < 8 ? size * 8 : 64;
  const std::size_t high_bits = size < 8 ? 0 : (size - 8) * 8;
  key.low &= low_bits == 64 ? ~0ULL : (1ULL << low_bits) - 1;
  key.high &= (1ULL << high_bits) - 1;  // size <= 15, so the top byte is always cleared
  key.high |= static_cast<std::uint64_t>(size) << 56;
  return key;
}

}  // namespace bert_fast::wordpiece
