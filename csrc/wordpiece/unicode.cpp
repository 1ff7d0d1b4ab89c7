#include "wordpiece/unicode.h"

namespace bert_fast::wordpiece {
namespace {

#include "wordpiece/unicode_tables.inc"

static_assert(1U << kBlockBits == kUnicodeBlock, "unicode.h and the generated tables disagree");

const UnicodeRecord& record(char32_t c) {
  const std::uint32_t block = kBlockIndex[c >> kBlockBits];
  return kRecords[kBlocks[block << kBlockBits | (c & (kUnicodeBlock - 1))]];
}

Mapping read_mapping(std::size_t start, std::size_t length, char32_t itself) {
  Mapping mapping;
  if (length == 0) {
    mapping.chars[0] = itself;
    mapping.size = 1;
  }
  for (; mapping.size < length; ++mapping.size) mapping.chars[mapping.size] = kMappingPool[start + mapping.size];
  return mapping;
}

// Unicode standard, section 3.12: a syllable is numbered by its leading consonant, vowel and trailing consonant.
constexpr char32_t kSyllableBase = 0xAC00, kLeadBase = 0x1100, kVowelBase = 0x1161, kTrailBase = 0x11A7;
static_assert(kSyllableBase % kUnicodeBlock == 0, "the first block of Hangul holds nothing else");
constexpr char32_t kVowels = 21, kTrails = 28, kSyllables = 11172;

Mapping decompose_hangul(char32_t syllable) {
  Mapping jamo;
  jamo.chars[0] = kLeadBase + syllable / (kVowels * kTrails);
  jamo.chars[1] = kVowelBase + syllable / kTrails % kVowels;
  jamo.chars[2] = kTrailBase + syllable % kTrails;
  jamo.size = syllable % kTrails == 0 ? 2 : 3;
  return jamo;
}

}  // namespace

bool is_whitespace(char32_t c) { return (record(c).flags & kWhitespace) != 0; }
bool is_control(char32_t c) { return (record(c).flags & kControl) != 0; }
bool is_punctuation(char32_t c) { return (record(c).flags & kPunctuation) != 0; }
bool is_cjk(char32_t c) { return (record(c).flags & kCjk) != 0; }
bool is_mark(char32_t c) { return (record(c).flags & kMark) != 0; }
bool is_word_character(char32_t c) { return (record(c).flags & kWord) != 0; }
std::uint8_t combining_class(char32_t c) { return record(c).combining_class; }

Mapping decompose(char32_t c) {
  if (c >= kSyllableBase && c < kSyllableBase + kSyllables) return decompose_hangul(c - kSyllableBase);
  const UnicodeRecord& r = record(c);
  return read_mapping(r.nfd_start, r.nfd_length, c);
}

Mapping to_lower(char32_t c) {
  const UnicodeRecord& r = record(c);
  return read_mapping(r.lower_start, r.lower_length, c);
}

std::uint16_t unicode_block_number(char32_t c) {
  // What is computed rather than stored must not look like a block of ordinary letters.
  constexpr std::uint16_t kFirstHangul = 0xFFFE, kLastHangul = 0xFFFF;
  const char32_t block = c >> kBlockBits, first = kSyllableBase >> kBlockBits;
  const char32_t last = (kSyllableBase + kSyllables - 1) >> kBlockBits;
  if (block >= first && block <= last) return block == last ? kLastHangul : kFirstHangul;
  return kBlockIndex[block];
}

}  // namespace bert_fast::wordpiece
