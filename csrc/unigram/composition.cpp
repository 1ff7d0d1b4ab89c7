#include "unigram/composition.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "wordpiece/unicode.h"

namespace bert_fast::unigram {
namespace {

#include "unigram/composition_tables.inc"

// Unicode standard, section 3.12; the first trailing consonant stands behind kTrailBase, which is no consonant itself.
constexpr char32_t kSyllableBase = 0xAC00, kLeadBase = 0x1100, kVowelBase = 0x1161, kTrailBase = 0x11A7;
constexpr char32_t kLeads = 19, kVowels = 21, kTrails = 28;

bool is_within(char32_t c, char32_t base, char32_t count) { return c >= base && c - base < count; }

char32_t compose_hangul(char32_t first, char32_t second) {
  if (is_within(first, kLeadBase, kLeads) && is_within(second, kVowelBase, kVowels)) {
    return kSyllableBase + ((first - kLeadBase) * kVowels + (second - kVowelBase)) * kTrails;
  }
  if (is_within(first, kSyllableBase, kLeads * kVowels * kTrails) && (first - kSyllableBase) % kTrails == 0 &&
      is_within(second, kTrailBase + 1, kTrails - 1)) {
    return first + (second - kTrailBase);
  }
  return 0;
}

std::vector<char32_t> second_characters() {
  std::vector<char32_t> seconds;
  for (const Composition& each : kCompositions) seconds.push_back(each.second);
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

// Whether the character becomes one with some character in front of it.
bool joins(char32_t c) {
  static const std::vector<char32_t> seconds = second_characters();
  return is_within(c, kVowelBase, kVowels) || is_within(c, kTrailBase + 1, kTrails - 1) ||
         std::binary_search(seconds.begin(), seconds.end(), c);
}

}  // namespace

char32_t compose(char32_t first, char32_t second) {
  if (second < 0x300) return 0;
  const auto key = std::make_pair(first, second);
  const auto* found =
      std::lower_bound(std::begin(kCompositions), std::end(kCompositions), key,
                       [](const Composition& a, const auto& b) { return std::make_pair(a.first, a.second) < b; });
  if (found != std::end(kCompositions) && found->first == first && found->second == second) return found->composed;
  return compose_hangul(first, second);
}

bool stays_composed(char32_t c) {
  if (c < 0x300) return true;
  const wordpiece::Mapping parts = wordpiece::decompose(c);
  char32_t composed = parts.chars[0];
  for (std::size_t k = 1; k < parts.size && composed != 0; ++k) composed = compose(composed, parts.chars[k]);
  return composed == c && wordpiece::combining_class(c) == 0 && !joins(c);
}

}  // namespace bert_fast::unigram
