#include "wordpiece/char_table.h"

#include <unordered_map>

namespace bert_fast::wordpiece {
namespace {

std::uint32_t mark_bits(char32_t c, const NormalizerOptions& options) {
  if (options.clean_text && is_control(c)) return CharEntry::kInvisible;
  if (!options.strip_accents) return 0;
  const Mapping parts = decompose(c);
  const bool starts = combining_class(parts.chars[0]) != 0;
  const bool ends = combining_class(parts.chars[parts.size - 1]) != 0;
  return (starts ? CharEntry::kStartsWithMark : 0) | (ends ? CharEntry::kEndsWithMark : 0);
}

CharEntry make_entry(char32_t c, const NormalizerOptions& options,
                     const std::function<std::int32_t(char32_t)>& token_of) {
  const std::uint32_t marks = mark_bits(c, options);
  const Mapping out = expand_char(c, options);
  if (out.size == 0) return {CharAction::kRemove, 0, marks};
  if (out.size > 1) return {CharAction::kExpand, 0, marks};
  const CharClass type = classify(out.chars[0]);
  if (type == CharClass::kSpace) return {CharAction::kSpace, 0, marks};
  if (type == CharClass::kPunctuation || (options.handle_chinese_chars && is_cjk(c))) {
    return {CharAction::kIsolate, static_cast<std::uint32_t>(token_of(out.chars[0])), marks};
  }
  if (out.chars[0] == c) return {CharAction::kCopy, 0, marks};
  return {CharAction::kSubstitute, out.chars[0], marks};
}

}  // namespace

CharClass classify(char32_t c) {
  if (is_whitespace(c)) return CharClass::kSpace;
  return is_punctuation(c) ? CharClass::kPunctuation : CharClass::kWord;
}

Mapping expand_char(char32_t c, const NormalizerOptions& options) {
  Mapping out;
  if (options.clean_text) {
    if (is_control(c)) return out;
    if (is_whitespace(c)) c = U' ';
  }
  Mapping parts;
  parts.chars[0] = c;
  parts.size = 1;
  if (options.strip_accents) parts = decompose(c);
  for (std::size_t k = 0; k < parts.size; ++k) {
    if (options.strip_accents && is_mark(parts.chars[k])) continue;
    if (!options.lowercase) {
      out.chars[out.size++] = parts.chars[k];
      continue;
    }
    const Mapping lowered = to_lower(parts.chars[k]);
    for (std::size_t j = 0; j < lowered.size; ++j) out.chars[out.size++] = lowered.chars[j];
  }
  return out;
}

CharTable::CharTable(const NormalizerOptions& options, const std::function<std::int32_t(char32_t)>& token_of) {
  // Blocks that look alike in the generated table, and in which no entry is tied to a token, look alike here, too.
  constexpr std::uint16_t kUnknown = 0xFFFF;
  std::unordered_map<std::uint16_t, std::uint16_t> shared;
  blocks_.reserve(kUnicodeLimit / kUnicodeBlock);
  for (char32_t start = 0; start < kUnicodeLimit; start += kUnicodeBlock) {
    const auto known = shared.find(unicode_block_number(start));
    if (known != shared.end() && known->second != kUnknown) {
      blocks_.push_back(known->second);
      continue;
    }
    const auto block = static_cast<std::uint16_t>(entries_.size() / kUnicodeBlock);
    bool sharable = true;
    for (char32_t c = start; c < start + kUnicodeBlock; ++c) {
      entries_.push_back(make_entry(c, options, token_of));
      const CharAction action = entries_.back().action();
      sharable = sharable && action != CharAction::kIsolate && action != CharAction::kSubstitute;
    }
    shared[unicode_block_number(start)] = sharable ? block : kUnknown;
    blocks_.push_back(block);
  }
}

}  // namespace bert_fast::wordpiece
