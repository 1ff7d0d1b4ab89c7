#include "cpu/rotary.h"

#include <cstring>
#include <stdexcept>

#include "cpu/keep_bits.h"
#include "cpu/parallel.h"

namespace bert_fast::cpu {
namespace {

// Memory is slower than one number after another.
void turn_interleaved(const TurnedHeads& heads, int64_t num_freqs) {
  for (int64_t head = 0; head < heads.num_heads; ++head) {
    const float* x = heads.x + head * heads.x_stride;
    float* y = heads.y + head * heads.y_stride;
    for (int64_t i = 0; i < num_freqs; ++i) {
      const float x1 = x[2 * i], x2 = x[2 * i + 1], cos = heads.cos[i], sin = heads.sin[i] * heads.sign;
      y[2 * i] = x1 * cos - x2 * sin;
      y[2 * i + 1] = x2 * cos + x1 * sin;
    }
  }
}

}  // namespace

void rotary(const RotaryArguments& args, int num_threads) {
  const int64_t head_size = 2 * args.num_freqs;
  require_shape(args.num_tokens, head_size);
  require_shape(args.num_parts, args.num_heads);
  require_shape(args.num_tokens, args.num_parts * args.num_heads);
  if (args.turned_parts < 0 || args.turned_parts > args.num_parts) {
    throw std::invalid_argument("turned_parts: expected at most num_parts");
  }
  const int64_t num_elements = args.num_tokens * args.num_parts * args.num_heads * head_size;
  require_address("x", args.x, num_elements);
  require_address("y", args.y, num_elements);
  require_address("cos", args.cos, num_elements);
  require_address("sin", args.sin, num_elements);
  const auto turn_heads = args.is_interleaved ? turn_interleaved : kernels().turn_heads;
  split_range(args.num_tokens, useful_threads(num_elements, num_threads), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t part = 0; part < args.num_parts; ++part) {
        const float* x = args.x + token * args.x_strides.token + part * args.x_strides.part;
        float* y = args.y + token * args.y_strides.token + part * args.y_strides.part;
        if (part < args.turned_parts) {
          turn_heads({x, y, args.cos + token * args.num_freqs, args.sin + token * args.num_freqs, args.x_strides.head,
                      args.y_strides.head, args.num_heads, args.is_backward ? -1.0f : 1.0f},
                     args.num_freqs);
        } else {
          for (int64_t head = 0; head < args.num_heads; ++head) {
            std::memcpy(y + head * args.y_strides.head, x + head * args.x_strides.head,
                        static_cast<size_t>(head_size) * sizeof(float));
          }
        }
      }
    }
  });
}

}  // namespace bert_fast::cpu
