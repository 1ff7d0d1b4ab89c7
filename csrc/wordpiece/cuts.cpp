#include "wordpiece/cuts.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace bert_fast::wordpiece {
namespace {

template <typename Unit>
std::size_t find_in_units(const TextTokenizer& tokenizer, const TextView& text, std::size_t from, std::size_t to) {
  const Unit* units = static_cast<const Unit*>(text.data);
  const auto code_point = [&](std::size_t i) -> char32_t {
    const char32_t c = units[i];
    return (c >= 0xD800 && c <= 0xDFFF) || c > 0x10FFFF ? kReplacement : c;
  };
  for (std::size_t i = from; i < to; ++i) {
    if (tokenizer.can_cut(code_point(i - 1), code_point(i))) return i;
  }
  return kNoCut;
}

std::size_t find_in_utf8(const TextTokenizer& tokenizer, std::string_view text, std::size_t from, std::size_t to) {
  const auto starts_character = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80; };
  // Length of the valid character at i, 0 if there is none.
  const auto character_size = [&](std::size_t i) {
    const std::size_t size = utf8_length(static_cast<unsigned char>(text[i]));
    return starts_character(i) && valid_utf8_prefix(text.substr(i, size)) == size ? size : std::size_t{0};
  };
  std::size_t at = from - 1;
  while (at > 0 && from - at < 4 && !starts_character(at)) --at;
  std::size_t size = character_size(at);
  for (;;) {
    const std::size_t next = at + std::max<std::size_t>(size, 1);
    if (next >= to) return kNoCut;
    const std::size_t next_size = character_size(next);
    if (size > 0 && next_size > 0 && next >= from) {
      const char *before = text.data() + at, *after = text.data() + next;
      if (tokenizer.can_cut(decode_utf8(before), decode_utf8(after))) return next;
    }
    at = next;
    size = next_size;
  }
}

}  // namespace

std::size_t find_cut(const TextTokenizer& tokenizer, const TextView& text, std::size_t from, std::size_t to) {
  to = std::min(to, text.length);
  if (from >= to) return kNoCut;
  switch (text.form) {
    case TextView::Form::kUtf8:
      return find_in_utf8(tokenizer, {static_cast<const char*>(text.data), text.length}, from, to);
    case TextView::Form::kUcs2:
      return find_in_units<std::uint16_t>(tokenizer, text, from, to);
    case TextView::Form::kUcs4:
      return find_in_units<char32_t>(tokenizer, text, from, to);
    default:
      return find_in_units<std::uint8_t>(tokenizer, text, from, to);
  }
}

TextView slice(const TextView& text, std::size_t begin, std::size_t end) {
  const std::size_t unit = text.form == TextView::Form::kUcs4 ? 4 : text.form == TextView::Form::kUcs2 ? 2 : 1;
  return {static_cast<const char*>(text.data) + begin * unit, end - begin, text.form};
}

}  // namespace bert_fast::wordpiece
