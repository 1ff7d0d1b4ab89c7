// AVX-512 with AVX512_BF16: 32 products and their sums by pairs in one instruction.

#include "cpu/bf16.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "cpu/bf16_avx512bf16_traits.h"
#include "cpu/bf16_body.h"

namespace bert_fast::cpu {
namespace {

using Body = Bf16Body<Avx512Bf16>;

constexpr Bf16Kernels kTable = {Body::round, Body::pack, Body::linear, nullptr};

}  // namespace

const Bf16Kernels* avx512bf16_bf16_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Bf16Kernels* avx512bf16_bf16_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
