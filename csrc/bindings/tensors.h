// Reads address, device, sizes and strides of PyTorch's tensors without PyTorch's headers, through the table of C
// functions that DLPack 1.3 defines (dlpack.h, DLPackExchangeAPI). `torch.Tensor.__dlpack_c_exchange_api__` holds it.

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
  // The result of Tensor.get_device for the CPU and CUDA; -2 for other devices.
  int device() const { return device_type == kCpu ? -1 : device_type == kCuda ? device_index : -2; }
  int64_t num_elements() const;
  bool is_contiguous() const;

  static constexpr int32_t kCpu = 1, kCuda = 2;
};

// Reads a tensor's fields. Returns 0, or -1 with an exception set. The tensor must be plain and have memory.
using ReadTensor = int (*)(void* tensor, TensorFields* fields);

// Returns the function of the table in a capsule, or null, without an exception, if the table has another major
// version.
ReadTensor reader_of(PyObject* capsule);

}  // namespace bert_fast::bindings
