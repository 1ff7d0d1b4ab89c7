// Memory that a program needs while it runs only. Layers of a model run one after the other, by the same program and
// with the same sizes: each takes the tensors of the one before, views of them included, in place of new ones. The
// stream puts their kernels in order, as it does for the caching allocator's own reuse.
//
// On each device one program keeps tensors at a time, up to kMaxKeptBytes: with more, a device is busy for longer than
// a host needs for new ones, and memory is better freed by the step that reads it last. Tensors are kept on the default
// stream only, while nothing is captured. Warm-ups of graphs run on other streams, with memory from the graph's pool,
// which has to be free when they are done.

#include <map>
#include <utility>
#include <vector>

#include "bindings/program.h"
#include "bindings/program_frame.h"

namespace bert_fast::bindings {
namespace {

constexpr int64_t kMaxKeptBytes = int64_t{128} << 20;

// By device, the program that keeps tensors; under the GIL, as everything here.
Body*& keeper_of(int device) {
  static std::map<int, Body*> keepers;
  return keepers[device];
}

void give_up_others(const Body& body) {
  Body* keeper = keeper_of(body.device);
  if (keeper != nullptr && keeper != &body) give_up_kept(*keeper);
}

bool is_small(const Body& body, const Frame& frame) {
  int64_t total = 0;
  for (const EmptyStep& step : body.empties) {
    if (!body.is_scratch[static_cast<size_t>(step.slot)]) continue;
    int64_t bytes = step.element_bytes;
    for (const int32_t size : step.shape) {
      if (frame.values[size] > kMaxKeptBytes) return false;
      bytes *= frame.values[size];
      if (bytes > kMaxKeptBytes) return false;
    }
    total += bytes;
  }
  return total <= kMaxKeptBytes;
}

}  // namespace

void give_up_kept(Body& body) {
  Body*& keeper = keeper_of(body.device);
  if (keeper == &body) keeper = nullptr;
  const std::vector<PyObject*> tensors = std::exchange(body.kept.tensors, {});
  for (PyObject* one : tensors) Py_DECREF(one);
}

bool take_kept(Body& body, void* stream, Frame& frame) {
  give_up_others(body);
  const bool keeps =
      !body.scratch.empty() && stream == nullptr && is_small(body, frame) && !host::is_captured(*body.driver, stream);
  if (body.kept.tensors.empty()) return keeps;
  bool is_same = keeps;
  for (size_t i = 0; is_same && i < body.scratch_numbers.size(); i++) {
    is_same = body.kept.sizes[i] == frame.values[body.scratch_numbers[i]];
  }
  if (!is_same) {
    give_up_kept(body);
    return keeps;
  }
  for (size_t i = 0; i < body.scratch.size(); i++) {
    frame.slots[body.scratch[i]] = body.kept.tensors[i];
    frame.addresses[body.scratch[i]] = body.kept.addresses[i];
  }
  body.kept.tensors.clear();
  return keeps;
}

void keep_scratch(Body& body, Frame& frame) {
  give_up_others(body);
  if (!body.kept.tensors.empty()) return;  // those of another thread's run
  Kept& kept = body.kept;
  kept.sizes.clear();
  kept.addresses.clear();
  for (const int32_t number : body.scratch_numbers) kept.sizes.push_back(frame.values[number]);
  for (const int32_t slot : body.scratch) kept.addresses.push_back(frame.addresses[slot]);
  kept.tensors.reserve(body.scratch.size());
  for (const int32_t slot : body.scratch) kept.tensors.push_back(std::exchange(frame.slots[slot], nullptr));
  keeper_of(body.device) = &body;
}

}  // namespace bert_fast::bindings
