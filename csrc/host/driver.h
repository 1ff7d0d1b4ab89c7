// What the executor of programs asks of NVIDIA's driver: four types of its interface (CUDA Driver API: execution
// control, tensor map objects), and its functions in the library that the process has loaded already.

#ifndef BERT_FAST_HOST_DRIVER_H_
#define BERT_FAST_HOST_DRIVER_H_

#include <cstdint>
#include <string>

namespace bert_fast::host {

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};

struct alignas(64) TensorMap {  // CUtensorMap
  uint64_t words[16];
};

struct Driver {
  int (*launch)(const LaunchConfig* config, void* function, void** parameters, void** extra);
  // Null where the driver is too old for tensor maps.
  int (*encode_tiled)(TensorMap* map, int element_type, uint32_t rank, void* address, const uint64_t* sizes,
                      const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                      int swizzle, int promotion, int fill);
  int (*error_string)(int code, const char** text);
  int (*is_capturing)(void* stream, int* status);
  int (*current_context)(void** context);
  int (*set_current_context)(void* context);
  int (*device)(int* device, int ordinal);
  int (*retain_primary_context)(void** context, int device);
};

// The functions of libcuda.so.1, null where this process has not loaded it. It is not loaded for the sake of them.
const Driver* loaded_driver();

// The driver's words for a code.
std::string error_text(const Driver& driver, int code);

// Whether a stream is being captured, or cannot be asked since another one is.
bool is_captured(const Driver& driver, void* stream);

// Makes the primary context of a device current in this thread if none is; returns the driver's code, 0 for success.
int ensure_context(const Driver& driver, int device);

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_DRIVER_H_
