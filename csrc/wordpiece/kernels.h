// The inner loops of the tokenizer, once for every instruction set: finding words in ASCII, 64 bytes at a time, looking
// words up, and copying. Everything here is plain pointers: the files that implement it are compiled for instruction
// sets that the machine may not have, so nothing in them may be shared with other files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bert_fast::wordpiece {

// Sets of ASCII characters, as bit matrices: bit h of rows[l] stands for the character 16 * h + l.
struct AsciiSet {
  alignas(16) std::uint8_t rows[16] = {};
  void add(unsigned char c) { rows[c & 15] = static_cast<std::uint8_t>(rows[c & 15] | 1U << (c >> 4)); }
};

// What the characters of ASCII do. A character of no set needs a closer look; NUL must be one of these.
struct AsciiClasses {
  AsciiSet word;
  AsciiSet punctuation;  // a word each
  AsciiSet space;
  bool lowercase = false;  // A to Z become a to z
};

// The classes of 64 characters, a bit each.
struct ClassMasks {
  std::uint64_t word;
  std::uint64_t punctuation;
  std::uint64_t space;
};

// Words found in normalized text and not looked up yet. Word i is text[starts[i] .. lasts[i]], both included; the last
// one may still be open (num_starts == num_lasts + 1): its end has not been read. An entry of starts with kLiteral is
// the id of a token that is known already.
struct WordSpans {
  static constexpr std::uint32_t kLiteral = 0x80000000;

  char* text = nullptr;  // at least kSlack bytes more than are used
  std::uint32_t* starts = nullptr;
  std::uint32_t* lasts = nullptr;
  std::uint32_t size = 0;  // bytes of text
  std::uint32_t num_starts = 0;
  std::uint32_t num_lasts = 0;
  std::uint32_t num_literals = 0;

  static constexpr std::size_t kSlack = 64;  // readable and writable behind all three arrays
  bool is_open() const { return num_starts != num_lasts; }
};

// A word of at most kMaxBytes bytes, none of them NUL: its bytes, then zeros.
struct WordKey {
  static constexpr std::size_t kMaxBytes = 16;
  std::uint64_t low;
  std::uint64_t high;
};

// Whole words -> ids, by a perfect hash function: a word has one place where it can be (see word_table.h).
struct WordTableView {
  const WordKey* keys = nullptr;               // by id; one that no word has for ids without a key
  const std::uint32_t* slots = nullptr;        // ids
  const std::uint32_t* multipliers = nullptr;  // by bucket
  std::uint64_t seed = 0;
  std::uint32_t bucket_shift = 0;
  std::uint32_t slot_shift = 0;
};

// A node of the vocabulary's trie; see trie.h.
struct TrieNode {
  static constexpr std::uint32_t kNoLabel = 0xFF;

  std::uint32_t bits;  // base << 9 | whether a token ends here << 8 | label

  bool has_label(std::uint32_t byte) const { return (bits & 0xFF) == byte; }
  bool ends_token() const { return (bits & 0x100) != 0; }
  std::uint32_t base() const { return bits >> 9; }
};
struct TrieView {
  static constexpr std::uint32_t kStartRoot = 256;
  static constexpr std::uint32_t kContinueRoot = 257;

  const TrieNode* nodes = nullptr;
  const std::int32_t* ids = nullptr;  // by node, of those where a token ends
};

// A word to be split into pieces: text[start .. end).
struct UnsplitWord {
  std::uint32_t start;
  std::uint32_t end;
};

// The pieces of words: the one that starts with text[p] has the id ids[p] and sizes[p] bytes.
struct PieceSpans {
  static constexpr std::int32_t kUnknown = -1;  // at the start of a word: it has no pieces

  std::int32_t* ids = nullptr;
  std::uint32_t* sizes = nullptr;
};

struct WordKernels {
  // Looks up the words [0, count): ids[i], and in `misses` the numbers of those that are not there (whose ids mean
  // nothing). Returns how many these are. Both arrays have room for count + 1 values.
  std::size_t (*find)(const WordTableView& table, const WordSpans& spans, std::size_t count, std::int32_t* ids,
                      std::uint32_t* misses);

  // Splits words into pieces, longest match first. A byte behind each word is readable.
  void (*split)(const TrieView& trie, const char* text, const UnsplitWord* words, std::size_t count,
                const PieceSpans& pieces);
};

struct Kernels {
  const char* name;
  const WordKernels& (*words)();

  // Takes characters of ASCII from text[0, size) as long as their classes are known: copies them, lower-cased if asked
  // for, to spans.text and enters the words. Returns how many it took. spans has room for `size` bytes and words.
  std::size_t (*scan)(const AsciiClasses& classes, const char* text, std::size_t size, WordSpans& spans);

  // Copies characters of ASCII from the start of `text`, at most `size`; returns how many.
  std::size_t (*narrow16)(const std::uint16_t* text, std::size_t size, char* out);
  std::size_t (*narrow32)(const std::uint32_t* text, std::size_t size, char* out);

  // Copies ids, which are not negative.
  void (*widen)(const std::int32_t* ids, std::size_t size, std::int64_t* out);
};

const WordKernels& portable_word_kernels();
const WordKernels& bmi2_word_kernels();  // x86-64 with BMI2 and LZCNT

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // x86-64 with AVX2 and BMI
const Kernels* avx512_kernels();  // ... and AVX-512 with VBMI2: Ice Lake, Zen 4 and later
const Kernels* neon_kernels();    // 64-bit ARM

}  // namespace bert_fast::wordpiece
