// A CUDA driver that runs nothing: what Triton's driver module and launchers ask of libcuda.so.1, with the checks that
// NVIDIA's driver makes of launches and tensor maps (CUDA Driver API: execution control, tensor map objects), and a
// log.
//
// Addresses are passed on and never followed, so tensors may lie anywhere. Kernels are cubins as ptxas made them: name,
// registers and shared memory are read from their ELF sections. Functions that start with null_ are for Python.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda.h"

enum {
  kMaxThreads = 1024,                // of a block
  kRegisters = 65536,                // of a block, handed out to a warp in units of 8 a thread
  kSharedWithoutAsking = 48 * 1024,  // bytes of a block; more needs cuFuncSetAttribute
  kMaxGridY = 65535,
  kMaxBoxSide = 256,
  kMaxElementStride = 8,
  kPortableCluster = 8,
  kLargestCluster = 16,
  kMaxParameters = 256,
};

typedef struct {
  uint16_t offset, size;  // bytes
} NullParameter;

struct CUfunc_st {
  char name[256];
  int registers;  // of a thread
  int local_bytes;
  int static_shared;
  int max_dynamic_shared;
  bool allows_large_clusters;
  int num_parameters;
  uint32_t parameter_bytes;  // of all
  NullParameter parameters[kMaxParameters];
};

typedef struct {
  int capability;  // 90
  int multiprocessors;
  int shared_per_block;  // bytes, the most that a kernel can ask for
} NullDevice;

typedef struct {
  const char* kernel;
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t parameter_bytes;  // 0 unless parameters are noted
  const unsigned char* parameters;
} NullLaunch;

extern NullDevice null_device;

// Notes that a call was refused, and why, in the manner of printf; returns the code.
CUresult null_refuse(CUresult code, const char* format, ...);
// parameters: as `cuLaunchKernelEx` takes them.
void null_note_launch(NullLaunch launch, CUfunction function, void** parameters);
void null_note_tensor_map(void);
// Returns whether this launch is the one that `null_fail_launch` chose.
bool null_is_to_fail(void);

// What the registers of a multiprocessor suffice for, in whole warps.
int null_max_threads(CUfunction function);
