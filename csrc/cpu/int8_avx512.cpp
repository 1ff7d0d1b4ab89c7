// AVX-512 without VNNI: products of 16 bits, so that pairs of them do not saturate.

#include "cpu/int8.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "cpu/int8_avx512_traits.h"
#include "cpu/int8_body.h"

namespace bert_fast::cpu {
namespace {

struct Avx512 : Avx512Base {
  static I dot(I acc, Bytes bytes, I weights) {
    const I even = _mm512_madd_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0xFF)),
                                     _mm512_srai_epi16(_mm512_slli_epi16(weights, 8), 8));
    const I odd = _mm512_madd_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srai_epi16(weights, 8));
    return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
  }
};

constexpr Int8Kernels kTable = {Int8Body<Avx512>::quantize, Int8Body<Avx512>::linear};

}  // namespace

const Int8Kernels* avx512_int8_kernels() { return &kTable; }

}  // namespace bert_fast::cpu

#else

namespace bert_fast::cpu {
const Int8Kernels* avx512_int8_kernels() { return nullptr; }
}  // namespace bert_fast::cpu

#endif
