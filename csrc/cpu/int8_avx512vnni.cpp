// AVX-512 with VNNI: 64 products of bytes and their sums by fours in one instruction.

#include "cpu/int8.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "cpu/int8_avx512_traits.h"
#include "cpu/int8_body.h"

namespace bert_fast::cpu {
namespace {

struct Avx512Vnni : Avx512Base {
  static I dot(I acc, Bytes bytes, I weights) { return _mm512_dpbusd_epi32(acc, bytes, weights); }
};

constexpr Int8Kernels kTable = {Int8Body<Avx512Vnni>::quantize, Int8Body<Avx512Vnni>::linear};

}  // namespace

const Int8Kernels* avx512vnni_int8_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Int8Kernels* avx512vnni_int8_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
