#include "cpu/keep_bits.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace bert_fast::cpu {
namespace {

constexpr int64_t kHeadStride = 65536;  // columns set aside for one head's keys
constexpr int64_t kKeysPerGroup = 32;   // keys that 4 blocks share out among themselves

// Turns the bits of 4 blocks, block j's value 2i + e in bit 8j + 2i + e of 32, into the order of the keys, bit
// 8i + 2j + e: the transpose of a 4 x 4 matrix of pairs of bits. Transposes 2 x 2 blocks of pairs, which lie 6 bits
// apart, then the 2 x 2 matrix of these blocks, 12 bits apart (Warren 2013, Hacker's Delight, section 7-3). Two groups
// at a time: the buffer has room for the neighbour of an odd one, see keep_bits_bytes.
void blocks_to_keys(uint8_t* bits, int64_t num_groups) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "byte 0 of a word is taken for its lowest");
  for (int64_t group = 0; group < num_groups; group += 2) {
    uint64_t word;
    std::memcpy(&word, bits + 4 * group, sizeof(word));
    uint64_t differs = (word ^ word >> 6) & 0x00CC00CC00CC00CCu;
    word ^= differs ^ differs << 6;
    differs = (word ^ word >> 12) & 0x0000F0F00000F0F0u;
    word ^= differs ^ differs << 12;
    std::memcpy(bits + 4 * group, &word, sizeof(word));
  }
}

}  // namespace

void require_shape(int64_t num_rows, int64_t num_cols) {
  // Their product, and few times that, must be a number of bytes.
  constexpr int64_t kMost = int64_t{1} << 56;
  if (num_rows < 0 || num_cols < 0 || (num_cols > 0 && num_rows > kMost / num_cols)) {
    throw std::invalid_argument("num_rows, num_cols: expected sizes >= 0 of a tensor, got " + std::to_string(num_rows) +
                                ", " + std::to_string(num_cols));
  }
}

void require_address(const char* name, const void* address, int64_t num_elements) {
  if (address == nullptr && num_elements > 0) {
    throw std::invalid_argument(std::string(name) + ": expected an address, got 0");
  }
}

void require_coords(const DropoutSpec& spec, const int32_t* coords, int64_t num_tokens) {
  if (spec.threshold > 65536) {
    throw std::invalid_argument("threshold: expected 0 .. 65536, got " + std::to_string(spec.threshold));
  }
  if (spec.active() && num_tokens > 0 && coords == nullptr) {
    throw std::invalid_argument("coords: expected the (row, position) of every token, got address 0");
  }
}

void require_attention_coords(const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal) {
  require_coords(spec, coords_q.data, 1);
  if (causal && (coords_q.data == nullptr || coords_k.data == nullptr)) {
    throw std::invalid_argument("coords_q, coords_k: causal needs the position of every token, got address 0");
  }
}

TokenKeepBits::TokenKeepBits(const Kernels& kernels, const DropoutSpec& spec, const int32_t* coords, int64_t num_cols)
    : kernels_(kernels),
      spec_(spec),
      coords_{coords},
      num_blocks_((num_cols + kColumnsPerBlock - 1) / kColumnsPerBlock),
      bits_(static_cast<size_t>(keep_bits_bytes(num_cols))) {}

const uint8_t* TokenKeepBits::draw(int64_t token) {
  if (!spec_.active()) return nullptr;
  const uint32_t position = static_cast<uint32_t>(coords_.position(token));
  kernels_.keep_bits(spec_, coords_.row(token), position, 0, num_blocks_, bits_.data());
  return bits_.data();
}

void require_ascending(Coords coords, int64_t first_token, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const int32_t before = coords.position(first_token + i - 1), position = coords.position(first_token + i);
    if (position <= before) {
      throw std::invalid_argument("coords_k: expected positions that ascend within a sequence, got " +
                                  std::to_string(before) + " before " + std::to_string(position));
    }
  }
}

ProbabilityKeepBits::ProbabilityKeepBits(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q,
                                         int64_t max_keys)
    : kernels_(kernels), spec_(spec), coords_q_(coords_q), bits_(static_cast<size_t>(keep_bits_bytes(max_keys))) {
  if (spec.active() && max_keys > kHeadStride) {
    throw std::invalid_argument("cu_seqlens_k: expected sequences of at most 65536 keys with dropout, got " +
                                std::to_string(max_keys));
  }
}

const uint8_t* ProbabilityKeepBits::draw(int64_t query_token, int64_t head, int64_t num_keys) {
  if (!spec_.active()) return nullptr;
  const uint32_t head_block = static_cast<uint32_t>(head) * (kHeadStride / kColumnsPerBlock);
  const int64_t num_groups = (num_keys + kKeysPerGroup - 1) / kKeysPerGroup;
  kernels_.keep_bits(spec_, coords_q_.row(query_token), static_cast<uint32_t>(coords_q_.position(query_token)),
                     head_block, num_groups * (kKeysPerGroup / kColumnsPerBlock), bits_.data());
  blocks_to_keys(bits_.data(), num_groups);
  return bits_.data();
}

QueryRows::QueryRows(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal,
                     float softmax_scale, int64_t max_keys)
    : spec_(spec),
      coords_q_(coords_q),
      coords_k_(coords_k),
      causal_(causal),
      softmax_scale_(softmax_scale),
      bits_(kernels, spec, coords_q, max_keys) {}

int64_t QueryRows::visible_keys(int64_t first_query, int64_t num_queries, int64_t first_key, int64_t num_keys) const {
  if (!causal_ || num_queries == 0) return num_keys;
  int32_t last_position = coords_q_.position(first_query);
  for (int64_t i = 1; i < num_queries; ++i) {
    last_position = std::max(last_position, coords_q_.position(first_query + i));
  }
  return keys_up_to(last_position, first_key, num_keys);
}

SoftmaxRow QueryRows::prepare(int64_t query_token, int64_t head, int64_t first_key, int64_t num_keys, int64_t width) {
  const int64_t visible = causal_ ? keys_up_to(coords_q_.position(query_token), first_key, num_keys) : num_keys;
  const uint8_t* bits = visible == 0 ? nullptr : bits_.draw(query_token, head, visible);
  return {visible, width, softmax_scale_, bits, spec_.scale, nullptr, nullptr};
}

int64_t QueryRows::keys_up_to(int32_t position, int64_t first_key, int64_t num_keys) const {
  int64_t low = 0, high = num_keys;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (coords_k_.position(first_key + middle) <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace bert_fast::cpu
