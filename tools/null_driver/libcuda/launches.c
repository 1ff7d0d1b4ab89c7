// Tensor maps and launches, checked as NVIDIA's driver would.

#include <string.h>

#include "null_driver.h"

// Bytes of an element, 0 for a type that there is not.
static int element_size(CUtensorMapDataType type) {
  static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return (unsigned)type < sizeof sizes / sizeof *sizes ? sizes[type] : 0;
}

#define REQUIRE(condition, ...) \
  if (!(condition)) return null_refuse(CUDA_ERROR_INVALID_VALUE, "tensor map: " __VA_ARGS__)

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  int size = element_size(type);
  bool is_float = type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (null_device.capability < 90)
    return null_refuse(CUDA_ERROR_NOT_SUPPORTED, "tensor map: none before capability 9.0");
  REQUIRE(map != NULL && (uintptr_t)map % 64 == 0, "not at a multiple of 64 bytes");
  REQUIRE(size != 0, "data type %d is not known here", (int)type);
  REQUIRE(rank >= 1 && rank <= 5, "rank %u", rank);
  REQUIRE(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE, "interleaved layouts are not known here");
  REQUIRE((uintptr_t)address % 16 == 0, "address %p is no multiple of 16 bytes", address);
  REQUIRE(is_float || fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, "NaN outside of integers");
  for (cuuint32_t i = 0; i < rank; i++) {
    REQUIRE(dims[i] >= 1 && dims[i] <= 1ull << 32, "size %llu of dimension %u", (unsigned long long)dims[i], i);
    REQUIRE(box[i] >= 1 && box[i] <= kMaxBoxSide, "side %u of the box in dimension %u", box[i], i);
    REQUIRE(element_strides[i] >= 1 && element_strides[i] <= kMaxElementStride, "element stride %u",
            element_strides[i]);
  }
  for (cuuint32_t i = 0; i + 1 < rank; i++) {
    REQUIRE(strides[i] % 16 == 0 && strides[i] < 1ull << 40, "stride of %llu bytes", (unsigned long long)strides[i]);
  }
  static const unsigned spans[] = {0, 32, 64, 128};  // bytes
  unsigned inner = box[0] * (unsigned)size;
  REQUIRE(inner % 16 == 0, "%u bytes in a row of the box", inner);
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) {
    unsigned span = (unsigned)swizzle < 4 ? spans[swizzle] : 128;
    REQUIRE(inner <= span, "%u bytes in a row of the box, swizzled over %u", inner, span);
  }
  // All that was asked for, each in a place of its own, so that maps of different matrices differ. A driver sets the
  // bit `kSet` too, which Triton clears in maps of small matrices.
  memset(map, 0, sizeof *map);
  const cuuint64_t kSet = 1ull << 21;
  map->opaque[0] = (cuuint64_t)(uintptr_t)address;
  map->opaque[1] = kSet | (cuuint64_t)type << 32 | (cuuint64_t)rank << 40 | (cuuint64_t)swizzle << 44 |
                   (cuuint64_t)promotion << 48 | (cuuint64_t)fill << 52;
  for (cuuint32_t i = 0; i < rank; i++) {
    map->opaque[2 + i] = dims[i];
    map->opaque[11] |= (cuuint64_t)box[i] << (9 * i);
    map->opaque[12] |= (cuuint64_t)element_strides[i] << (4 * i);
    if (i + 1 < rank) map->opaque[7 + i] = strides[i];
  }
  null_note_tensor_map();
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                 const cuuint64_t* dims, const cuuint64_t* strides, const int* lower, const int* upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* element_strides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  (void)map, (void)type, (void)rank, (void)address, (void)dims, (void)strides, (void)lower, (void)upper;
  (void)channels, (void)pixels, (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  return null_refuse(CUDA_ERROR_NOT_SUPPORTED, "tensor map: of convolutions");
}

static unsigned cluster_of(const CUlaunchConfig* config) {
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return config->attrs[i].value.clusterDim.x;
  }
  return 1;
}

static CUresult check_launch(const CUlaunchConfig* config, CUfunction function) {
  const char* name = function->name;
  unsigned x = config->gridDimX, y = config->gridDimY, z = config->gridDimZ;
  unsigned long long threads = 1ull * config->blockDimX * config->blockDimY * config->blockDimZ;
  if (x < 1 || x > INT32_MAX || y < 1 || y > kMaxGridY || z < 1 || z > kMaxGridY) {
    return null_refuse(CUDA_ERROR_INVALID_VALUE, "%s: grid of %u x %u x %u", name, x, y, z);
  }
  if (threads < 1 || threads > kMaxThreads) {
    return null_refuse(CUDA_ERROR_INVALID_VALUE, "%s: block of %llu threads", name, threads);
  }
  int allowed = kSharedWithoutAsking - function->static_shared;
  if (function->max_dynamic_shared > allowed) allowed = function->max_dynamic_shared;
  if ((long long)config->sharedMemBytes > allowed) {
    return null_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory, at most %d were asked for", name,
                       config->sharedMemBytes, allowed);
  }
  if (threads > (unsigned)null_max_threads(function)) {
    return null_refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "%s: %llu threads of %d registers", name, threads,
                       function->registers);
  }
  unsigned cluster = cluster_of(config);
  unsigned largest = function->allows_large_clusters ? kLargestCluster : kPortableCluster;
  if (cluster != 1 && (null_device.capability < 90 || cluster > largest || x % cluster != 0)) {
    return null_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: clusters of %u in a grid of %u", name, cluster, x);
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  (void)extra;
  if (function == NULL) return null_refuse(CUDA_ERROR_INVALID_HANDLE, "no function");
  if (parameters == NULL) return null_refuse(CUDA_ERROR_INVALID_VALUE, "%s: no parameters", function->name);
  CUresult code = check_launch(config, function);
  if (code != CUDA_SUCCESS) return code;
  if (null_is_to_fail()) return null_refuse(CUDA_ERROR_LAUNCH_FAILED, "%s: is to fail", function->name);
  NullLaunch launch = {
      .kernel = function->name,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .threads = config->blockDimX * config->blockDimY * config->blockDimZ,
      .shared_bytes = config->sharedMemBytes,
  };
  null_note_launch(launch, function, parameters);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters, void** extra) {
  CUlaunchConfig config = {.gridDimX = x,
                           .gridDimY = y,
                           .gridDimZ = z,
                           .blockDimX = block_x,
                           .blockDimY = block_y,
                           .blockDimZ = block_z,
                           .sharedMemBytes = shared_bytes,
                           .hStream = stream};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
