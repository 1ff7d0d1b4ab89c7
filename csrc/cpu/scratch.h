// Working memory of a routine.

#ifndef BERT_FAST_CPU_SCRATCH_H_
#define BERT_FAST_CPU_SCRATCH_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace bert_fast::cpu {

// Uninitialised floats on a cache line's boundary: vector loads that cross lines cost twice.
class Scratch {
 public:
  explicit Scratch(int64_t size) {
    const size_t bytes = (static_cast<size_t>(size) * sizeof(float) + 127) / 64 * 64;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

// The same of bf16 values.
class Bf16Scratch {
 public:
  explicit Bf16Scratch(int64_t size) : floats_((size + 1) / 2) {}
  uint16_t* get() const { return reinterpret_cast<uint16_t*>(floats_.get()); }

 private:
  const Scratch floats_;
};

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_SCRATCH_H_
