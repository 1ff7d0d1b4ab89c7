// Cubins and the kernels in them.

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "null_driver.h"

struct CUmod_st {
  char* image;
  struct CUfunc_st* functions;
  int num_functions;
};

enum { kInfoFrame = 0x11, kInfoParameter = 0x17, kInfoRegisters = 0x2f };

// What .nv.info says of a function: records of (format, attribute, size), here with a payload of (symbol, value).
static int info_of(const char* info, size_t size, int attribute, uint32_t symbol) {
  enum { kHasPayload = 4 };
  for (size_t at = 0; at + 4 <= size;) {
    const unsigned char* record = (const unsigned char*)info + at;
    uint16_t length = 0;
    if (record[0] == kHasPayload) memcpy(&length, record + 2, 2);
    if (record[0] == kHasPayload && record[1] == attribute && length == 8 && at + 12 <= size) {
      uint32_t payload[2];
      memcpy(payload, record + 4, 8);
      if (payload[0] == symbol) return (int)payload[1];
    }
    at += 4 + length;
  }
  return 0;
}

// Of .nv.info.<kernel>: records of (index, ordinal and offset, size in the upper 14 bits).
static void read_parameters(struct CUfunc_st* function, const unsigned char* info, size_t size) {
  enum { kHasPayload = 4 };
  for (size_t at = 0; at + 4 <= size;) {
    uint16_t length = 0, places[2];
    if (info[at] == kHasPayload) memcpy(&length, info + at + 2, 2);
    if (info[at] == kHasPayload && info[at + 1] == kInfoParameter && length == 12 && at + 16 <= size) {
      uint32_t bits;
      memcpy(places, info + at + 8, 4);
      memcpy(&bits, info + at + 12, 4);
      if (places[0] < kMaxParameters) {
        NullParameter parameter = {places[1], (uint16_t)(bits >> 18)};
        uint32_t end = (uint32_t)parameter.offset + parameter.size;
        function->parameters[places[0]] = parameter;
        if (places[0] >= function->num_parameters) function->num_parameters = places[0] + 1;
        if (end > function->parameter_bytes) function->parameter_bytes = end;
      }
    }
    at += 4 + length;
  }
}

// From sm_90 on, ptxas books a kilobyte for the system with the kernel's own; limits of a block leave it out.
static int own_shared(int booked) {
  enum { kReserved = 1024 };
  return null_device.capability >= 90 && booked >= kReserved ? booked - kReserved : booked;
}

// A kernel's code lies in ".text.<name>", whose sh_info holds its symbol in the lower 24 bits.
static void read_functions(CUmodule module) {
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)module->image;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(module->image + header->e_shoff);
  const char* names = module->image + sections[header->e_shstrndx].sh_offset;
  const Elf64_Shdr* info = NULL;
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info") == 0) info = &sections[i];
  }
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = names + sections[i].sh_name;
    if (strncmp(name, ".text.", 6) != 0) continue;
    struct CUfunc_st* function = &module->functions[module->num_functions++];
    snprintf(function->name, sizeof function->name, "%s", name + 6);
    uint32_t symbol = sections[i].sh_info & 0xffffff;
    if (info != NULL) {
      const char* records = module->image + info->sh_offset;
      function->registers = info_of(records, info->sh_size, kInfoRegisters, symbol);
      function->local_bytes = info_of(records, info->sh_size, kInfoFrame, symbol);
    }
    for (int j = 0; j < header->e_shnum; j++) {
      const char* other = names + sections[j].sh_name;
      if (strncmp(other, ".nv.shared.", 11) == 0 && strcmp(other + 11, name + 6) == 0) {
        function->static_shared = own_shared((int)sections[j].sh_size);
      }
      if (strncmp(other, ".nv.info.", 9) == 0 && strcmp(other + 9, name + 6) == 0) {
        read_parameters(function, (const unsigned char*)module->image + sections[j].sh_offset, sections[j].sh_size);
      }
    }
  }
}

static size_t image_size(const Elf64_Ehdr* header) {
  size_t size = header->e_shoff + (size_t)header->e_shnum * sizeof(Elf64_Shdr);
  size_t programs = header->e_phoff + (size_t)header->e_phnum * sizeof(Elf64_Phdr);
  return size > programs ? size : programs;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const Elf64_Ehdr* header = image;
  if (image == NULL || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_shoff == 0) {
    return null_refuse(CUDA_ERROR_INVALID_IMAGE, "the image is no cubin");
  }
  CUmodule loaded = calloc(1, sizeof *loaded);
  size_t size = image_size(header);
  loaded->image = malloc(size);
  memcpy(loaded->image, image, size);
  loaded->functions = calloc(header->e_shnum, sizeof *loaded->functions);
  read_functions(loaded);
  *module = loaded;
  return CUDA_SUCCESS;
}

// The log names functions, so they stay.
CUresult cuModuleUnload(CUmodule module) {
  free(module->image);
  module->image = NULL;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  for (int i = 0; i < module->num_functions; i++) {
    if (strcmp(module->functions[i].name, name) == 0) {
      *function = &module->functions[i];
      return CUDA_SUCCESS;
    }
  }
  return null_refuse(CUDA_ERROR_NOT_FOUND, "the module holds no kernel %s", name);
}

int null_max_threads(CUfunction function) {
  int of_a_thread = (function->registers + 7) / 8 * 8;
  int threads = of_a_thread ? kRegisters / of_a_thread / 32 * 32 : kMaxThreads;
  return threads < kMaxThreads ? threads : kMaxThreads;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  if (function == NULL) return null_refuse(CUDA_ERROR_INVALID_HANDLE, "no function");
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = function->registers;
      break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = function->local_bytes;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = function->static_shared;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = null_max_threads(function);
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = function->max_dynamic_shared;
      break;
    default:
      return null_refuse(CUDA_ERROR_INVALID_VALUE, "function attribute %d is not known here", (int)attribute);
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (function == NULL) return null_refuse(CUDA_ERROR_INVALID_HANDLE, "no function");
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
    function->allows_large_clusters = value != 0;
    return CUDA_SUCCESS;
  }
  // Others are of later drivers; Triton tries them first and goes on without.
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  if (value < 0 || value + function->static_shared > null_device.shared_per_block) {
    return null_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %d bytes of shared memory asked for, a block has %d",
                       function->name, value + function->static_shared, null_device.shared_per_block);
  }
  function->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  (void)config;
  return function != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function, const CUlaunchConfig* config) {
  (void)function, (void)config;
  *clusters = null_device.multiprocessors / kPortableCluster;
  return CUDA_SUCCESS;
}
