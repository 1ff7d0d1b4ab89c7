#include "cpu/keep_bits.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace bert_fast::cpu {
namespace {

constexpr int32_t kHeadStride = 65536;  // columns set aside for one head's keys

}  // namespace

void require_shape(int64_t num_rows, int64_t num_cols) {
  if (num_rows < 0 || num_cols < 0) {
    throw std::invalid_argument("num_rows, num_cols: expected sizes >= 0, got " + std::to_string(num_rows) + ", " +
                                std::to_string(num_cols));
  }
}

void require_coords(const DropoutSpec& spec, const int32_t* coords, int64_t num_tokens) {
  if (spec.threshold > 65536) {
    throw std::invalid_argument("threshold: expected 0 .. 65536, got " + std::to_string(spec.threshold));
  }
  if (spec.active() && num_tokens > 0 && coords == nullptr) {
    throw std::invalid_argument("coords: expected the (row, position) of every token, got a null address");
  }
}

void require_attention_coords(const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal) {
  require_coords(spec, coords_q.data, 1);
  require_coords(spec, coords_k.data, 1);
  if (causal && (coords_q.data == nullptr || coords_k.data == nullptr)) {
    throw std::invalid_argument("coords_q, coords_k: causal needs the position of every token, got a null address");
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

KeyPositions key_positions(Coords coords, int64_t first_token, int64_t count) {
  KeyPositions keys;
  keys.first_token = first_token;
  keys.count = count;
  if (count == 0) return keys;
  if (coords.data == nullptr) {
    keys.max = static_cast<int32_t>(count - 1);
    return keys;
  }
  keys.min = keys.max = coords.position(first_token);
  for (int64_t c = 0; c < count; ++c) {
    const int32_t position = coords.position(first_token + c);
    keys.consecutive = keys.consecutive && position - c == coords.position(first_token);
    keys.min = std::min(keys.min, position);
    keys.max = std::max(keys.max, position);
  }
  if (keys.min < 0 || keys.max >= kHeadStride) {
    throw std::invalid_argument("coords_k: expected key positions in [0, 65536), got " +
                                std::to_string(keys.min < 0 ? keys.min : keys.max));
  }
  return keys;
}

ProbabilityKeepBits::ProbabilityKeepBits(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q,
                                         Coords coords_k, int64_t max_keys)
    : kernels_(kernels),
      spec_(spec),
      coords_q_(coords_q),
      coords_k_(coords_k),
      bits_(static_cast<size_t>(keep_bits_bytes(max_keys))) {}

const uint8_t* ProbabilityKeepBits::draw(int64_t query_token, int64_t head, const KeyPositions& keys) {
  if (!spec_.active()) return nullptr;
  const int32_t first_block = keys.min / kColumnsPerBlock;
  const int64_t num_blocks = keys.max / kColumnsPerBlock - first_block + 1;
  const size_t num_bytes = static_cast<size_t>(keep_bits_bytes(num_blocks * kColumnsPerBlock));
  if (drawn_.size() < num_bytes) drawn_.resize(num_bytes);
  const uint32_t head_block = static_cast<uint32_t>(head) * (kHeadStride / kColumnsPerBlock);
  kernels_.keep_bits(spec_, coords_q_.row(query_token), static_cast<uint32_t>(coords_q_.position(query_token)),
                     head_block + static_cast<uint32_t>(first_block), num_blocks, drawn_.data());

  const int shift = keys.min % kColumnsPerBlock;
  if (keys.consecutive && shift == 0) return drawn_.data();
  const size_t key_bytes = static_cast<size_t>((keys.count + 7) / 8);
  if (keys.consecutive) {
    for (size_t i = 0; i < key_bytes; ++i) {
      const uint32_t two = drawn_[i] | static_cast<uint32_t>(drawn_[i + 1]) << 8;
      bits_[i] = static_cast<uint8_t>(two >> shift);
    }
    return bits_.data();
  }
  std::fill_n(bits_.begin(), key_bytes, uint8_t{0});
  for (int64_t c = 0; c < keys.count; ++c) {
    const int32_t bit = coords_k_.position(keys.first_token + c) - first_block * static_cast<int32_t>(kColumnsPerBlock);
    const uint32_t kept = drawn_[static_cast<size_t>(bit / 8)] >> (bit % 8) & 1u;
    bits_[static_cast<size_t>(c / 8)] |= static_cast<uint8_t>(kept << (c % 8));
  }
  return bits_.data();
}

QueryRows::QueryRows(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal,
                     float softmax_scale, int64_t max_keys)
    : spec_(spec),
      coords_q_(coords_q),
      coords_k_(coords_k),
      causal_(causal),
      softmax_scale_(softmax_scale),
      bits_(kernels, spec, coords_q, coords_k, max_keys) {}

SoftmaxRow QueryRows::prepare(const KeyPositions& keys, int64_t query_token, int64_t head, float* scores,
                              int64_t width) {
  int64_t visible = keys.count;
  if (causal_ && visible > 0) {
    const int32_t position = coords_q_.position(query_token);
    if (keys.consecutive) {
      visible = std::clamp<int64_t>(int64_t{position} - keys.min + 1, 0, keys.count);
    } else {
      for (int64_t c = 0; c < keys.count; ++c) {
        if (coords_k_.position(keys.first_token + c) > position) scores[c] = -std::numeric_limits<float>::infinity();
      }
    }
  }
  const uint8_t* bits = visible == 0 ? nullptr : bits_.draw(query_token, head, keys);
  return {visible, width, softmax_scale_, bits, spec_.scale};
}

}  // namespace bert_fast::cpu
