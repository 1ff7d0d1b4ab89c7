// UTF-8: decoding of valid text, repair of invalid text, conversion from the fixed-width forms that Python strings
// have.
//
// Policy for input that is not valid Unicode: each maximal invalid part of UTF-8 bytes (Unicode standard, section 3.9,
// "substitution of maximal subparts"; what Python's errors="replace" does) and each lone surrogate count as one U+FFFD.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace bert_fast::wordpiece {

constexpr char32_t kReplacement = 0xFFFD;

// Surrogates, which no valid text has, become U+FFFD.
inline char32_t replace_surrogate(char32_t c) { return (c & 0xFFFFF800) == 0xD800 ? kReplacement : c; }

// A text owned by somebody else, in one of the forms in which it can be read without a copy.
struct TextView {
  enum class Form {
    kAscii,  // every byte is below 128
    kUtf8,   // bytes that may be invalid
    kUcs1,   // one byte per code point (Latin-1)
    kUcs2,   // two bytes per code point; surrogates stand for themselves
    kUcs4,   // four bytes per code point
  };
  const void* data = nullptr;
  std::size_t length = 0;  // in units of the form
  Form form = Form::kAscii;

  std::size_t size_bytes() const { return length * (form == Form::kUcs4 ? 4 : form == Form::kUcs2 ? 2 : 1); }
};

// Length in bytes of the character that starts with `lead`; the text must be valid.
inline std::size_t utf8_length(unsigned char lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

// Reads one code point of valid UTF-8 and moves `p` behind it.
inline char32_t decode_utf8(const char*& p) {
  const auto byte = [&](int i) { return static_cast<char32_t>(static_cast<unsigned char>(p[i])); };
  const char32_t lead = byte(0);
  if (lead < 0x80) {
    p += 1;
    return lead;
  }
  if (lead < 0xE0) {
    const char32_t c = (lead & 0x1F) << 6 | (byte(1) & 0x3F);
    p += 2;
    return c;
  }
  if (lead < 0xF0) {
    const char32_t c = (lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    p += 3;
    return c;
  }
  const char32_t c = (lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  p += 4;
  return c;
}

// Writes one code point to `out` (room for 4 bytes) and returns how many bytes it took.
inline std::size_t encode_utf8(char32_t c, char* out) {
  if (c < 0x80) {
    out[0] = static_cast<char>(c);
    return 1;
  }
  if (c < 0x800) {
    out[0] = static_cast<char>(0xC0 | c >> 6);
    out[1] = static_cast<char>(0x80 | (c & 0x3F));
    return 2;
  }
  if (c < 0x10000) {
    out[0] = static_cast<char>(0xE0 | c >> 12);
    out[1] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out[2] = static_cast<char>(0x80 | (c & 0x3F));
    return 3;
  }
  out[0] = static_cast<char>(0xF0 | c >> 18);
  out[1] = static_cast<char>(0x80 | (c >> 12 & 0x3F));
  out[2] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
  out[3] = static_cast<char>(0x80 | (c & 0x3F));
  return 4;
}

inline void append_utf8(char32_t c, std::string& out) {
  char bytes[4];
  out.append(bytes, encode_utf8(c, bytes));
}

bool is_ascii(const char* data, std::size_t size);

// Number of code points of valid UTF-8.
std::size_t count_code_points(std::string_view text);

// Length in bytes of the longest valid prefix.
std::size_t valid_utf8_prefix(std::string_view bytes);

// Valid UTF-8 of the text by the policy above: a view of its own bytes where they serve as they are, otherwise of
// `storage`, which is overwritten. The view lives as long as both.
std::string_view to_utf8(const TextView& text, std::string& storage);

}  // namespace bert_fast::wordpiece
