// Keep bits of the rows that the routines walk: tokens of a [T, H] tensor, and queries against the keys of a sequence.

#ifndef BERT_FAST_CPU_KEEP_BITS_H_
#define BERT_FAST_CPU_KEEP_BITS_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace bert_fast::cpu {

// Coordinates: [T, 2] int32, (row in the original batch, position in the sequence) of every token.
struct Coords {
  const int32_t* data;
  uint32_t row(int64_t token) const { return static_cast<uint32_t>(data[2 * token]); }
  int32_t position(int64_t token) const { return data[2 * token + 1]; }
};

// The checks that every routine shares; they throw std::invalid_argument.
void require_shape(int64_t num_rows, int64_t num_cols);
// A buffer may be missing only where it has no elements.
void require_address(const char* name, const void* address, int64_t num_elements);
// Without tokens no coordinates are needed: PyTorch gives tensors without elements no address.
void require_coords(const DropoutSpec& spec, const int32_t* coords, int64_t num_tokens);
void require_attention_coords(const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal);

// Draws the keep bits of one token after the other into one buffer.
class TokenKeepBits {
 public:
  TokenKeepBits(const Kernels& kernels, const DropoutSpec& spec, const int32_t* coords, int64_t num_cols);

  // The bits of columns 0 .. num_cols - 1 of a token, valid until the next call; nullptr when nothing is dropped.
  const uint8_t* draw(int64_t token);

 private:
  const Kernels& kernels_;
  DropoutSpec spec_;
  Coords coords_;
  int64_t num_blocks_;
  std::vector<uint8_t> bits_;
};

// Causal finds the keys that a query sees by bisection. Throws std::invalid_argument where the positions of tokens
// first_token .. first_token + count - 1 do not ascend strictly.
void require_ascending(Coords coords, int64_t first_token, int64_t count);

// Draws the keep bits of one query and head after the other. A key is named by its ordinal in its sequence; which 16
// bits are its own is said in bert_fast/reference/dropout.py.
class ProbabilityKeepBits {
 public:
  // Throws std::invalid_argument for more keys than a head has names for.
  ProbabilityKeepBits(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q, int64_t max_keys);

  // Bit c belongs to key c. Valid until the next call; nullptr when nothing is dropped.
  const uint8_t* draw(int64_t query_token, int64_t head, int64_t num_keys);

 private:
  const Kernels& kernels_;
  DropoutSpec spec_;
  Coords coords_q_;
  std::vector<uint8_t> bits_;
};

// What one query sees of the keys of its sequence: causal by position, dropout by keep bits.
class QueryRows {
 public:
  QueryRows(const Kernels& kernels, const DropoutSpec& spec, Coords coords_q, Coords coords_k, bool causal,
            float softmax_scale, int64_t max_keys);

  // How many of the first keys any of these queries sees.
  int64_t visible_keys(int64_t first_query, int64_t num_queries, int64_t first_key, int64_t num_keys) const;

  // The softmax of one row of `width` scores, without a bias; keys that causal hides are left out. Valid until the next
  // call.
  SoftmaxRow prepare(int64_t query_token, int64_t head, int64_t first_key, int64_t num_keys, int64_t width);

 private:
  int64_t keys_up_to(int32_t position, int64_t first_key, int64_t num_keys) const;

  DropoutSpec spec_;
  Coords coords_q_;
  Coords coords_k_;
  bool causal_;
  float softmax_scale_;
  ProbabilityKeepBits bits_;
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_KEEP_BITS_H_
