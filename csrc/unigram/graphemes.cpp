#include "unigram/graphemes.h"

#include <cstdint>
#include <vector>

namespace bert_fast::unigram {
namespace {

struct CharRange {
  char32_t first;
  char32_t last;
};

#include "unigram/grapheme_tables.inc"

enum : std::uint8_t {
  kContinue = 1,
  kPrepend = 2,
  kBreak = 4,
  kPictograph = 8,
  kExtend = 16,
  kConsonant = 32,
  kLinker = 64,
  kLinkerExtend = 128,
};

template <std::size_t kSize>
void add(const CharRange (&ranges)[kSize], std::uint8_t flag, std::vector<std::uint8_t>& flags) {
  for (const CharRange& range : ranges) {
    for (char32_t c = range.first; c <= range.last; ++c) flags[c] |= flag;
  }
}

std::vector<std::uint8_t> make_flags() {
  std::vector<std::uint8_t> flags(0x110000);
  flags[0] = kBreak;
  add(kContinues, kContinue, flags);
  add(kPrepends, kPrepend, flags);
  add(kBreaks, kBreak, flags);
  add(kPictographs, kPictograph, flags);
  add(kExtends, kExtend, flags);
  add(kConsonants, kConsonant, flags);
  add(kLinkers, kLinker, flags);
  add(kLinkerExtends, kLinkerExtend, flags);
  return flags;
}

std::uint8_t flags_of(char32_t c) {
  static const std::vector<std::uint8_t> flags = make_flags();
  return flags[c];
}

enum class Hangul { kNone, kLead, kVowel, kTail, kOpen, kClosed };  // kOpen, kClosed: syllables without and with a tail

Hangul hangul_of(char32_t c) {
  if (c < 0x1100) return Hangul::kNone;
  if (c < 0x1160 || (c >= 0xA960 && c <= 0xA97C)) return Hangul::kLead;
  if (c < 0x11A8 || (c >= 0xD7B0 && c <= 0xD7C6)) return Hangul::kVowel;
  if (c < 0x1200 || (c >= 0xD7CB && c <= 0xD7FB)) return Hangul::kTail;
  if (c >= 0xAC00 && c <= 0xD7A3) return (c - 0xAC00) % 28 == 0 ? Hangul::kOpen : Hangul::kClosed;
  return Hangul::kNone;
}

bool joins_syllable(char32_t before, char32_t after) {
  const Hangul left = hangul_of(before), right = hangul_of(after);
  if (left == Hangul::kLead) return right != Hangul::kNone && right != Hangul::kTail;
  if (left == Hangul::kVowel || left == Hangul::kOpen) return right == Hangul::kVowel || right == Hangul::kTail;
  if (left == Hangul::kTail || left == Hangul::kClosed) return right == Hangul::kTail;
  return false;
}

constexpr char32_t kJoiner = 0x200D;

}  // namespace

std::size_t cluster_size(const char32_t* chars, std::size_t size) {
  if (size < 2) return size;
  if (chars[0] < 0x80 && chars[1] < 0x80) return chars[0] == '\r' && chars[1] == '\n' ? 2 : 1;
  bool after_pictograph = false;         // a pictograph, and nothing but what extends it
  bool after_pictograph_joiner = false;  // ... and a joiner
  bool after_consonant = false;          // a consonant, and nothing but linkers and what may stand beside them
  bool after_linker = false;             // a linker among these
  for (std::size_t i = 0;; ++i) {
    const std::uint8_t flags = flags_of(chars[i]);
    if (i + 1 == size || (flags & kBreak) != 0) return i + 1;
    after_pictograph_joiner = after_pictograph && chars[i] == kJoiner;
    after_pictograph = (flags & kPictograph) != 0 || (after_pictograph && (flags & kExtend) != 0);
    if ((flags & kConsonant) != 0) {
      after_consonant = true;
      after_linker = false;
    } else {
      after_consonant = after_consonant && (flags & (kLinker | kLinkerExtend)) != 0;
      after_linker = after_consonant && (after_linker || (flags & kLinker) != 0);
    }
    const std::uint8_t next = flags_of(chars[i + 1]);
    if ((next & kBreak) != 0) return i + 1;
    const bool joins = (next & kContinue) != 0 || (flags & kPrepend) != 0 || joins_syllable(chars[i], chars[i + 1]) ||
                       (after_pictograph_joiner && (next & kPictograph) != 0) ||
                       (after_linker && (next & kConsonant) != 0);
    if (!joins) return i + 1;
  }
}

bool is_plain(char32_t c) { return flags_of(c) == 0 && hangul_of(c) == Hangul::kNone; }
bool continues_cluster(char32_t c) { return (flags_of(c) & kContinue) != 0; }
bool breaks_clusters(char32_t c) { return (flags_of(c) & kBreak) != 0; }

}  // namespace bert_fast::unigram
