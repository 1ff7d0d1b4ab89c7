#include "host/driver.h"

#include <dlfcn.h>

#include "host/library.h"

namespace bert_fast::host {
namespace {

bool find_all(void* library, Driver* driver) {
  find_function(library, "cuTensorMapEncodeTiled", &driver->encode_tiled);
  return find_function(library, "cuLaunchKernelEx", &driver->launch) &&
         find_function(library, "cuStreamIsCapturing", &driver->is_capturing) &&
         find_function(library, "cuGetErrorString", &driver->error_string) &&
         find_function(library, "cuCtxGetCurrent", &driver->current_context) &&
         find_function(library, "cuCtxSetCurrent", &driver->set_current_context) &&
         find_function(library, "cuDeviceGet", &driver->device) &&
         find_function(library, "cuDevicePrimaryCtxRetain", &driver->retain_primary_context);
}

}  // namespace

const Driver* loaded_driver() {
  static Driver driver;
  static bool is_found = false;  // under the GIL, as everything here
  if (!is_found) {
    // The handle stays open: the functions are used as long as the process lives.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    is_found = library != nullptr && find_all(library, &driver);
  }
  return is_found ? &driver : nullptr;
}

std::string error_text(const Driver& driver, int code) {
  const char* text = nullptr;
  if (driver.error_string(code, &text) != 0 || text == nullptr) return "code " + std::to_string(code);
  return text;
}

bool is_captured(const Driver& driver, void* stream) {
  int status = 0;
  return driver.is_capturing(stream, &status) != 0 || status != 0;
}

int ensure_context(const Driver& driver, int device) {
  void* context = nullptr;
  int code = driver.current_context(&context);
  if (code != 0 || context != nullptr) return code;
  int found = 0;
  code = driver.device(&found, device);
  if (code == 0) code = driver.retain_primary_context(&context, found);
  if (code == 0) code = driver.set_current_context(context);
  return code;
}

}  // namespace bert_fast::host
