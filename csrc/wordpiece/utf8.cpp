#include "wordpiece/utf8.h"

#include <cstring>

namespace bert_fast::wordpiece {
namespace {

constexpr std::uint64_t kHighBits = 0x8080808080808080ULL;

// What the bytes at the start of a text are: the code point if they are valid, and how many belong together.
struct Sequence {
  bool valid;
  std::size_t size;  // of the character, or of the maximal invalid part
};

// The first continuation byte has a narrower range after some leads: this keeps out overlong forms, surrogates and
// values beyond U+10FFFF (Unicode standard, table 3-7).
Sequence read_sequence(const unsigned char* p, std::size_t available) {
  const unsigned char lead = p[0];
  if (lead < 0x80) return {true, 1};
  if (lead < 0xC2 || lead > 0xF4) return {false, 1};
  const std::size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < size; ++i) {
    if (i == available || p[i] < low || p[i] > high) return {false, i};
    low = 0x80;
    high = 0xBF;
  }
  return {true, size};
}

void repair_utf8(std::string_view bytes, std::string& out) {
  out.clear();
  while (!bytes.empty()) {
    const std::size_t valid = valid_utf8_prefix(bytes);
    out.append(bytes.data(), valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) return;
    const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
    append_utf8(kReplacement, out);
    bytes.remove_prefix(read_sequence(p, bytes.size()).size);
  }
}

template <typename Unit>
void transcode(const void* data, std::size_t length, std::string& out) {
  constexpr std::size_t kMaxBytes = sizeof(Unit) == 1 ? 2 : sizeof(Unit) == 2 ? 3 : 4;
  const Unit* units = static_cast<const Unit*>(data);
  out.resize(length * kMaxBytes + 4);  // encode_utf8 wants room for 4 bytes at the last character, too
  char* end = out.data();
  for (std::size_t i = 0; i < length; ++i) {
    end += encode_utf8(replace_surrogate(units[i]), end);
  }
  out.resize(static_cast<std::size_t>(end - out.data()));
}

}  // namespace

bool is_ascii(const char* data, std::size_t size) {
  std::uint64_t all = 0;
  std::size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, data + i, 8);
    all |= word;
  }
  for (; i < size; ++i) all |= static_cast<unsigned char>(data[i]);
  return (all & kHighBits) == 0;
}

std::size_t count_code_points(std::string_view text) {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

std::size_t valid_utf8_prefix(std::string_view bytes) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  std::size_t i = 0;
  while (i < bytes.size()) {
    if (i + 8 <= bytes.size()) {
      std::uint64_t word;
      std::memcpy(&word, p + i, 8);
      if ((word & kHighBits) == 0) {
        i += 8;
        continue;
      }
    }
    const Sequence sequence = read_sequence(p + i, bytes.size() - i);
    if (!sequence.valid) return i;
    i += sequence.size;
  }
  return i;
}

std::string_view to_utf8(const TextView& text, std::string& storage) {
  const std::string_view bytes(static_cast<const char*>(text.data), text.length);
  switch (text.form) {
    case TextView::Form::kAscii:
      return bytes;
    case TextView::Form::kUtf8:
      if (valid_utf8_prefix(bytes) == bytes.size()) return bytes;
      repair_utf8(bytes, storage);
      break;
    case TextView::Form::kUcs1:
      transcode<std::uint8_t>(text.data, text.length, storage);
      break;
    case TextView::Form::kUcs2:
      transcode<std::uint16_t>(text.data, text.length, storage);
      break;
    case TextView::Form::kUcs4:
      transcode<char32_t>(text.data, text.length, storage);
      break;
  }
  return storage;
}

}  // namespace bert_fast::wordpiece
