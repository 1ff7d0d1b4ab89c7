// A compiled kernel as its launches see it: which arguments are parameters, where they lie, what they were compiled
// for.

#ifndef BERT_FAST_HOST_KERNEL_H_
#define BERT_FAST_HOST_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/cubin.h"
#include "host/driver.h"

namespace bert_fast::host {

// A matrix that a kernel takes as a tensor map: what of it was compiled into the kernel.
struct WindowForm {
  int element_type = 0;   // of the driver's
  int element_bytes = 0;  // of an element
  int swizzle = 0;
  uint32_t box_rows = 0, box_cols = 0;
  // Triton 3.9 and later clear a bit of small maps that drivers up to 13.1 set.
  bool clears_bit_of_small = false;
};

enum class ArgumentKind : uint8_t {
  kPointer,
  kInt32,
  kFloat32,
  kWindow,    // becomes a map, two sizes, two strides
  kOne,       // an integer that the kernel was compiled for as 1: no parameter
  kNone,      // an operand that is not there: no parameter
  kConstant,  // no parameter
};

struct Argument {
  ArgumentKind kind = ArgumentKind::kConstant;
  bool is_specialised = false;  // of an integer: kernels differ by whether it is 1 or a multiple of 16
  bool is_divisible = false;    // compiled for multiples of 16
  WindowForm window;
};

struct Kernel {
  std::string name;
  void* function = nullptr;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  int device = 0;
  std::vector<Argument> arguments;

  // Two more parameters follow: workspace for the kernel and for a profiler, which such kernels have not.
  static constexpr int kNumScratch = 2;
  static constexpr size_t kMaxParameters = 160;
};

// Empty if the kernel's parameters are those that its cubin says, else the first difference.
std::string disagreement(const Kernel& kernel, const Parameters& found);

// Encodes the map of a row-major matrix as Triton does; returns the driver's code, 0 for success.
int encode_window(const Driver& driver, const WindowForm& form, uint64_t address, int64_t rows, int64_t cols,
                  int64_t row_stride, TensorMap* map);

// Maps of one operand of one launch, by what they are of: as many as the layers of a model have, and some more.
class MapTable {
 public:
  // The map, or null with the driver's code. It stays as it is until the next call.
  TensorMap* find(const Driver& driver, const WindowForm& form, uint64_t address, int64_t rows, int64_t cols,
                  int64_t row_stride, int* code);

 private:
  static constexpr size_t kSize = 64;
  struct Entry {
    TensorMap map;
    uint64_t address = 0;  // 0: empty
    int64_t rows = 0, cols = 0, row_stride = 0;
  };
  std::vector<Entry> entries_;
};

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_KERNEL_H_
