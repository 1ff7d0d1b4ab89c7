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

// The entry of a code point; of one that is a word of its own, without its id. `out`: what becomes of it.
CharEntry make_entry(char32_t c, const NormalizerOptions& options, const Mapping& out) {
  const std::uint32_t marks = mark_bits(c, options);
  if (out.size == 0) return {CharAction::kRemove, 0, marks};
  if (out.size > 1) return {CharAction::kExpand, 0, marks};
  const CharClass type = classify(out.chars[0]);
  if (type == CharClass::kSpace) return {CharAction::kSpace, 0, marks};
  if (type == CharClass::kPunctuation || (options.handle_chinese_chars && is_cjk(c))) {
    return {CharAction::kIsolate, 0, marks};
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

CharTable::CharTable(const NormalizerOptions& options, const std::vector<CharToken>& tokens, std::int32_t unknown) {
  // Blocks that look alike in the generated table, and none of whose code points becomes another one, are alike here.
  std::unordered_map<std::uint16_t, std::uint16_t> shared;
  struct Isolated {
    char32_t c;  // becomes another code point that is a word of its own
    char32_t word;
  };
  std::vector<Isolated> isolated;
  blocks_.reserve(kUnicodeLimit / kUnicodeBlock);
  for (char32_t start = 0; start < kUnicodeLimit; start += kUnicodeBlock) {
    const auto known = shared.find(unicode_block_number(start));
    bool sharable = true;
    if (known != shared.end()) {
      blocks_.push_back(known->second);
      continue;
    }
    blocks_.push_back(static_cast<std::uint16_t>(entries_.size() / kUnicodeBlock));
    for (char32_t c = start; c < start + kUnicodeBlock; ++c) {
      const Mapping out = expand_char(c, options);
      CharEntry entry = make_entry(c, options, out);
      if (entry.action() == CharAction::kIsolate) {
        if (out.chars[0] != c) isolated.push_back({c, out.chars[0]});
        entry = entry.with_value(static_cast<std::uint32_t>(unknown));
      }
      sharable = sharable && (out.size != 1 || out.chars[0] == c || entry.action() == CharAction::kSpace);
      entries_.push_back(entry);
    }
    if (sharable) shared.emplace(unicode_block_number(start), blocks_.back());
  }

  std::vector<std::uint16_t> num_uses(entries_.size() / kUnicodeBlock, 0);
  for (const std::uint16_t block : blocks_) ++num_uses[block];
  const auto set_token = [&](char32_t c, std::int32_t id) {
    std::uint16_t& block = blocks_[c / kUnicodeBlock];
    if (num_uses[block] > 1) {  // a copy of its own
      --num_uses[block];
      const auto first = static_cast<std::ptrdiff_t>(block * kUnicodeBlock);
      const std::vector<CharEntry> copy(entries_.begin() + first, entries_.begin() + first + kUnicodeBlock);
      block = static_cast<std::uint16_t>(num_uses.size());
      num_uses.push_back(1);
      entries_.insert(entries_.end(), copy.begin(), copy.end());
    }
    CharEntry& entry = entries_[block * kUnicodeBlock + c % kUnicodeBlock];
    entry = entry.with_value(static_cast<std::uint32_t>(id));
  };
  std::unordered_map<char32_t, std::int32_t> ids;
  for (const CharToken& token : tokens) {
    if ((*this)[token.c].action() != CharAction::kIsolate) continue;
    ids.emplace(token.c, token.id);
    if (const Mapping out = expand_char(token.c, options); out.chars[0] == token.c) set_token(token.c, token.id);
  }
  for (const Isolated& one : isolated) {
    const auto found = ids.find(one.word);
    if (found != ids.end()) set_token(one.c, found->second);
  }
}

}  // namespace bert_fast::wordpiece
