#include "unigram/charsmap.h"

#include <stdexcept>

#include "wordpiece/utf8.h"

namespace bert_fast::unigram {
namespace {

std::uint32_t read_unit(std::string_view bytes, std::size_t at) {
  std::uint32_t unit = 0;
  for (std::size_t k = 4; k-- > 0;) unit = unit << 8 | static_cast<unsigned char>(bytes[at + k]);
  return unit;
}

std::uint32_t label(std::uint32_t unit) { return unit & 0x800000FF; }
std::uint32_t offset(std::uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); }
bool ends_key(std::uint32_t unit) { return (unit & 0x100) != 0; }

}  // namespace

Charsmap::Charsmap(std::string_view bytes) {
  const std::size_t size = bytes.size() < 4 ? 0 : read_unit(bytes, 0);
  if (bytes.size() < 4 || size % 4 != 0 || size > bytes.size() - 4 || size == 0) {
    throw std::invalid_argument("charsmap: expected the size of a trie and the trie, got " +
                                std::to_string(bytes.size()) + " bytes that do not hold it");
  }
  for (std::size_t at = 4; at < 4 + size; at += 4) units_.push_back(read_unit(bytes, at));
  replacements_ = bytes.substr(4 + size);
  if (wordpiece::valid_utf8_prefix(replacements_) != replacements_.size()) {
    throw std::invalid_argument("charsmap: expected replacements in UTF-8");
  }
  for (const std::uint32_t unit : units_) {
    const std::size_t start = unit & 0x7FFFFFFF;
    if (unit >> 31 != 0 && (start >= replacements_.size() || replacements_[start] == '\0')) removes_ = true;
  }
}

std::optional<std::string_view> Charsmap::find(std::string_view text) const {
  if (units_.empty()) return std::nullopt;
  std::size_t place = offset(units_[0]);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    place ^= byte;
    if (byte == 0 || place >= units_.size() || label(units_[place]) != byte) return std::nullopt;
    const std::uint32_t unit = units_[place];
    place ^= offset(unit);
    if (!ends_key(unit)) continue;
    if (place >= units_.size()) return std::nullopt;
    const std::size_t start = units_[place] & 0x7FFFFFFF;
    // Within a character there is no replacement: only a damaged map says so.
    if (start >= replacements_.size() || (static_cast<unsigned char>(replacements_[start]) & 0xC0) == 0x80) {
      return std::string_view();
    }
    const std::size_t end = replacements_.find('\0', start);
    return std::string_view(replacements_).substr(start, end == std::string::npos ? end : end - start);
  }
  return std::nullopt;
}

}  // namespace bert_fast::unigram
