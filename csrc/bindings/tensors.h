// What tensors of PyTorch say of themselves, read in C without PyTorch's headers: by the table of functions that
// DLPack 1.3 defines for this (dlpack.h, DLPackExchangeAPI), which `torch.Tensor.__dlpack_c_exchange_api__` holds since
// PyTorch 2.11. Asking the methods of the tensor takes more than twice as long.

#pragma once

#include <Python.h>

#include <cstdint>

namespace bert_fast::bindings {

// DLPack's DLTensor, in its layout.
struct TensorFields {
  void* data;
  int32_t device_type, device_index;
  int32_t num_dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t* sizes;    // they live as long as the tensor
  const int64_t* strides;  // of elements
  uint64_t offset;         // bytes

  uint64_t address() const { return reinterpret_cast<uint64_t>(data) + offset; }
  // As Tensor.get_device says it, for the CPU and CUDA; -2: another one.
  int device() const { return device_type == kCpu ? -1 : device_type == kCuda ? device_index : -2; }
  int64_t num_elements() const;
  bool is_contiguous() const;

  static constexpr int32_t kCpu = 1, kCuda = 2;
};

// Reads a tensor's fields; 0, or -1 with an exception. The tensor is to be a plain one with memory.
using ReadTensor = int (*)(void* tensor, TensorFields* fields);

// The function of a table that a capsule holds; null, without an exception, where there is none of a known version.
ReadTensor reader_of(PyObject* capsule);

}  // namespace bert_fast::bindings
