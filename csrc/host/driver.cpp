#include "host/driver.h"

#include <dlfcn.h>

namespace bert_fast::host {
namespace {

template <class F>
bool find(void* library, const char* name, F** function) {
  *function = reinterpret_cast<F*>(dlsym(library, name));
  return *function != nullptr;
}

bool find_all(void* library, Driver* driver) {
  find(library, "cuTensorMapEncodeTiled", &driver->encode_tiled);
  return find(library, "cuLaunchKernelEx", &driver->launch) &&
         find(library, "cuStreamIsCapturing", &driver->is_capturing) &&
         find(library, "cuGetErrorString", &driver->error_string) &&
         find(library, "cuCtxGetCurrent", &driver->current_context) &&
         find(library, "cuCtxSetCurrent", &driver->set_current_context) &&
         find(library, "cuDeviceGet", &driver->device) &&
         find(library, "cuDevicePrimaryCtxRetain", &driver->retain_primary_context);
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
