// What short words became before: tokens of up to eight pieces, by the bytes of the word with the space in front of it.
// One for each thread, shared by all tokenizers that it runs. A word has two places; the one that came last is looked
// at first, and of three words with the same places the first one goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>
#include <utility>

namespace bert_fast::unigram {

struct WordKey {
  static constexpr std::size_t kMostBytes = 23;

  std::uint64_t words[3] = {0, 0, 0};  // the bytes, zeros, and how many bytes there are in the last byte

  WordKey() = default;
  explicit WordKey(std::string_view word) {
    std::memcpy(words, word.data(), word.size());
    finish(word.size());
  }
  // The first `size` of 24 bytes that can be read.
  WordKey(const char* bytes, std::size_t size) {
    static constexpr unsigned char kMasks[48] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                                                 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
    std::uint64_t masks[3];
    std::memcpy(masks, kMasks + 24 - size, sizeof(masks));
    std::memcpy(words, bytes, sizeof(words));
    for (int i = 0; i < 3; ++i) words[i] &= masks[i];
    finish(size);
  }

  bool operator==(const WordKey& other) const {
    return ((words[0] ^ other.words[0]) | (words[1] ^ other.words[1]) | (words[2] ^ other.words[2])) == 0;
  }
  std::size_t hash() const {
    const std::uint64_t mixed =
        words[0] * 0x9E3779B97F4A7C15 ^ words[1] * 0xC2B2AE3D27D4EB4F ^ words[2] * 0x165667B19E3779F9;
    return static_cast<std::size_t>((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 >> 32);
  }

 private:
  void finish(std::size_t size) {
    // Into the byte that comes last where the first one comes first.
    words[2] |= static_cast<std::uint64_t>(size) << 56;
  }
};

class WordCache {
 public:
  static constexpr std::size_t kMostTokens = 8;
  static constexpr std::size_t kSets = 32768;  // of two words of 64 bytes: 4 MB, and 1.5 MB of places

  struct alignas(64) Entry {
    WordKey key;
    std::uint32_t serial = 0;  // 0: nothing is here
    std::uint8_t num_tokens = 0;
    std::uint8_t num_words = 0;
    std::int32_t ids[kMostTokens];
  };
  // Of the tokens of an entry: code points from the start of the word, and which word each belongs to.
  struct Places {
    std::uint8_t starts[kMostTokens];
    std::uint8_t stops[kMostTokens];
    std::uint8_t words[kMostTokens];
  };

  WordCache() : entries_(2 * kSets), places_(2 * kSets) {}

  // The first of the two places of a word.
  static std::size_t place_of(const WordKey& key) { return 2 * (key.hash() % kSets); }
  bool holds(std::size_t place, const WordKey& key, std::uint32_t serial) const {
    return entries_[place].serial == serial && entries_[place].key == key;
  }
  const Entry& entry(std::size_t place) const { return entries_[place]; }
  const Places& places(std::size_t place) const { return places_[place]; }

  // Makes room at the first place.
  void push_back(std::size_t place) {
    entries_[place + 1] = entries_[place];
    places_[place + 1] = places_[place];
  }
  // Exchanges what stands at the two places.
  void swap(std::size_t place) {
    std::swap(entries_[place], entries_[place + 1]);
    std::swap(places_[place], places_[place + 1]);
  }
  void prefetch(std::size_t place) const {
    __builtin_prefetch(&entries_[place]);
    __builtin_prefetch(&entries_[place + 1]);
  }
  Entry& entry(std::size_t place) { return entries_[place]; }
  Places& places(std::size_t place) { return places_[place]; }

 private:
  // Objects whose bytes are all zero, in memory that the system gives when it is first written to.
  template <typename T>
  class Zeros {
   public:
    explicit Zeros(std::size_t count) : memory_(std::calloc(count + 1, sizeof(T))) {
      if (memory_ == nullptr) throw std::bad_alloc();
      const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
      first_ = reinterpret_cast<T*>((address + alignof(T) - 1) / alignof(T) * alignof(T));
    }
    T& operator[](std::size_t i) { return first_[i]; }
    const T& operator[](std::size_t i) const { return first_[i]; }

   private:
    struct Free {
      void operator()(void* memory) const { std::free(memory); }
    };
    static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
    std::unique_ptr<void, Free> memory_;
    T* first_;
  };

  Zeros<Entry> entries_;
  Zeros<Places> places_;
};

}  // namespace bert_fast::unigram
