// The forms in which a text can be read without a copy: how wide its units are and how a code point is read.
#pragma once

#include <cstdint>

#include "wordpiece/kernels.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {

struct Utf8Units {  // valid UTF-8
  using Unit = unsigned char;
  static constexpr bool kIsBytes = true;
  static char32_t read(const Unit*& p) {
    const char* q = reinterpret_cast<const char*>(p);
    const char32_t c = decode_utf8(q);
    p = reinterpret_cast<const Unit*>(q);
    return c;
  }
};

struct Latin1Units {
  using Unit = unsigned char;
  static constexpr bool kIsBytes = true;
  static char32_t read(const Unit*& p) { return *p++; }
};

struct Ucs2Units {  // surrogates stand for themselves
  using Unit = std::uint16_t;
  static constexpr bool kIsBytes = false;
  static char32_t read(const Unit*& p) { return replace_surrogate(*p++); }
  static std::size_t narrow(const Kernels& kernels, const Unit* text, std::size_t size, char* out) {
    return kernels.narrow16(text, size, out);
  }
};

struct Ucs4Units {
  using Unit = std::uint32_t;
  static constexpr bool kIsBytes = false;
  static char32_t read(const Unit*& p) { return replace_surrogate(*p++); }
  static std::size_t narrow(const Kernels& kernels, const Unit* text, std::size_t size, char* out) {
    return kernels.narrow32(text, size, out);
  }
};

}  // namespace bert_fast::wordpiece
