// Any processor: loops over 16 lanes, which the compiler makes vectors of.

#include "cpu/int8_body.h"

namespace bert_fast::cpu {
namespace {

struct Portable {
  static constexpr int kLanes = 16, kRows = 2, kBlocks = 1;
  template <class T>
  struct Lanes {
    T of[kLanes];
  };
  using F = Lanes<float>;
  using I = Lanes<int32_t>;
  struct Bytes {
    uint8_t of[kInt8Depth];
  };

  template <class T, class Function>
  static BERT_FAST_INLINE Lanes<T> make(Function function) {
    Lanes<T> made;
    for (int i = 0; i < kLanes; ++i) made.of[i] = function(i);
    return made;
  }
  static F load(const float* p) {
    return make<float>([&](int i) { return p[i]; });
  }
  static void store(float* p, const F& x) { store_first(p, x, kLanes); }
  static F load_first(const float* p, int n) {
    return make<float>([&](int i) { return i < n ? p[i] : 0.0f; });
  }
  static void store_first(float* p, const F& x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x.of[i];
  }
  static I load_ints(const int32_t* p) { return load_ints_first(p, kLanes); }
  static I load_ints_first(const int32_t* p, int n) {
    return make<int32_t>([&](int i) { return i < n ? p[i] : 0; });
  }
  static I load_bytes(const int8_t* p) {  // four in each lane
    I made;
    __builtin_memcpy(&made, p, sizeof(made));
    return made;
  }
  static F set1(float x) {
    return make<float>([&](int) { return x; });
  }
  static I set1_int(int32_t x) {
    return make<int32_t>([&](int) { return x; });
  }
  static F add(const F& a, const F& b) {
    return make<float>([&](int i) { return a.of[i] + b.of[i]; });
  }
  static F multiply(const F& a, const F& b) {
    return make<float>([&](int i) { return a.of[i] * b.of[i]; });
  }
  static F min(const F& a, const F& b) {
    return make<float>([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
  }
  static F max(const F& a, const F& b) {
    return make<float>([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
  }
  static float reduce_min(const F& x) {
    float least = x.of[0];
    for (const float value : x.of) least = value < least ? value : least;
    return least;
  }
  static float reduce_max(const F& x) {
    float greatest = x.of[0];
    for (const float value : x.of) greatest = value > greatest ? value : greatest;
    return greatest;
  }
  static float reduce_add(const F& x) {
    float sum = 0.0f;
    for (const float value : x.of) sum += value;
    return sum;
  }
  static I subtract_product(const I& a, const I& b, const I& c) {  // that of all is no greater than int32
    return make<int32_t>([&](int i) { return static_cast<int32_t>(int64_t{a.of[i]} - int64_t{b.of[i]} * c.of[i]); });
  }
  static F to_float(const I& x) {
    return make<float>([&](int i) { return static_cast<float>(x.of[i]); });
  }
  static void store_quantized(uint8_t* p, const F& x, float inverse, int32_t zero) {
    for (int i = 0; i < kLanes; ++i) {
      const int32_t rounded = static_cast<int32_t>(__builtin_rintf(x.of[i] * inverse)) + zero;
      p[i] = static_cast<uint8_t>(rounded < 0 ? 0 : rounded > 255 ? 255 : rounded);
    }
  }
  static Bytes spread(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static I dot(const I& acc, const Bytes& bytes, const I& weights) {
    int8_t of_lanes[kLanes * kInt8Depth];
    __builtin_memcpy(of_lanes, &weights, sizeof(of_lanes));
    return make<int32_t>([&](int i) {
      int32_t sum = acc.of[i];
      for (int k = 0; k < kInt8Depth; ++k) sum += int32_t{bytes.of[k]} * of_lanes[i * kInt8Depth + k];
      return sum;
    });
  }
};

constexpr Int8Kernels kTable = {Int8Body<Portable>::quantize, Int8Body<Portable>::linear};

}  // namespace

const Int8Kernels* portable_int8_kernels() { return &kTable; }

}  // namespace bert_fast::cpu
