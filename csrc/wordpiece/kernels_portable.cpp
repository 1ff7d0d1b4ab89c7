#include <cstring>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {
namespace {

struct Isa {
  struct Block {
    unsigned char bytes[64] = {};
  };
  static Block load_block(const char* p) { return load_block(p, 64); }
  static Block load_block(const char* p, std::size_t size) {
    Block block;
    std::memcpy(block.bytes, p, size);
    return block;
  }

  static ClassMasks classify(const AsciiClasses& classes, const Block& block, char* out) {
    ClassMasks masks = {};
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned c = block.bytes[i];
      const bool is_upper = classes.lowercase && c - 'A' < 26;
      out[i] = static_cast<char>(is_upper ? c | 0x20 : c);
      const auto bit = [&](const AsciiSet& set) {  // c >> 4 is at least 8 beyond ASCII: no bit is left
        return static_cast<std::uint64_t>(set.rows[c & 15] >> (c >> 4) & 1);
      };
      masks.word |= bit(classes.word) << i;
      masks.punctuation |= bit(classes.punctuation) << i;
      masks.space |= bit(classes.space) << i;
    }
    return masks;
  }

  static void positions(std::uint64_t mask, std::uint32_t base, std::uint32_t* out) {
    for (; mask != 0; mask &= mask - 1) *out++ = base + static_cast<std::uint32_t>(__builtin_ctzll(mask));
  }
};

#include "wordpiece/kernels_body.h"

constexpr Kernels kKernels = {"portable", portable_word_kernels, scan, narrow16, narrow32, widen};

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace bert_fast::wordpiece
