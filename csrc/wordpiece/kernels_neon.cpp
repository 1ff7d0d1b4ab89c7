#if defined(__aarch64__)

#include <arm_neon.h>

#include "wordpiece/kernels.h"

namespace bert_fast::wordpiece {
namespace {

struct Isa {
  struct Block {
    uint8x16_t part[4];
  };
  static Block load_block(const char* p) {
    const auto* q = reinterpret_cast<const std::uint8_t*>(p);
    return {{vld1q_u8(q), vld1q_u8(q + 16), vld1q_u8(q + 32), vld1q_u8(q + 48)}};
  }
  static Block load_block(const char* p, std::size_t size) {
    char bytes[64] = {};
    __builtin_memcpy(bytes, p, size);
    return load_block(bytes);
  }

  // One bit for each of 64 bytes that are 0 or 255: bits within bytes first, then sums of neighbours.
  static std::uint64_t gather(const uint8x16_t (&part)[4]) {
    const uint8x16_t bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t low = vpaddq_u8(vandq_u8(part[0], bits), vandq_u8(part[1], bits));
    const uint8x16_t high = vpaddq_u8(vandq_u8(part[2], bits), vandq_u8(part[3], bits));
    const uint8x16_t quarters = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(quarters, quarters)), 0);
  }

  static ClassMasks classify(const AsciiClasses& classes, const Block& block, char* out) {
    const uint8x16_t bits = {1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0, 0, 0, 0};
    const auto members = [&](const AsciiSet& set) {
      const uint8x16_t rows = vld1q_u8(set.rows);
      uint8x16_t hits[4];
      for (int i = 0; i < 4; ++i) {
        const uint8x16_t x = block.part[i];
        // Bytes from 128 on have no column.
        hits[i] = vtstq_u8(vqtbl1q_u8(rows, vandq_u8(x, vdupq_n_u8(15))), vqtbl1q_u8(bits, vshrq_n_u8(x, 4)));
      }
      return gather(hits);
    };
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t x = block.part[i];
      const uint8x16_t is_upper = vcltq_u8(vsubq_u8(x, vdupq_n_u8('A')), vdupq_n_u8(classes.lowercase ? 26 : 0));
      vst1q_u8(reinterpret_cast<std::uint8_t*>(out) + 16 * i, vorrq_u8(x, vandq_u8(is_upper, vdupq_n_u8(0x20))));
    }
    return {members(classes.word), members(classes.punctuation), members(classes.space)};
  }

  static void positions(std::uint64_t mask, std::uint32_t base, std::uint32_t* out) {
    for (; mask != 0; mask &= mask - 1) *out++ = base + static_cast<std::uint32_t>(__builtin_ctzll(mask));
  }
};

#include "wordpiece/kernels_body.h"

constexpr Kernels kKernels = {"neon", portable_word_kernels, scan, narrow16, narrow32, widen};

}  // namespace

const Kernels* neon_kernels() { return &kKernels; }

}  // namespace bert_fast::wordpiece

#endif
