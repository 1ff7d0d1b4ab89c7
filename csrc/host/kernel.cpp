#include "host/kernel.h"

namespace bert_fast::host {
namespace {

struct Expected {
  uint32_t size, alignment;
};

std::vector<Expected> expected_parameters(const Kernel& kernel) {
  std::vector<Expected> expected;
  for (const Argument& one : kernel.arguments) {
    switch (one.kind) {
      case ArgumentKind::kPointer:
        expected.push_back({8, 8});
        break;
      case ArgumentKind::kInt32:
      case ArgumentKind::kFloat32:
        expected.push_back({4, 4});
        break;
      case ArgumentKind::kWindow:
        expected.insert(expected.end(), {{sizeof(TensorMap), alignof(TensorMap)}, {4, 4}, {4, 4}, {8, 8}, {8, 8}});
        break;
      case ArgumentKind::kOne:
      case ArgumentKind::kNone:
      case ArgumentKind::kConstant:
        break;
    }
  }
  expected.insert(expected.end(), Kernel::kNumScratch, {8, 8});
  return expected;
}

uint32_t rounded_up(uint32_t value, uint32_t alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace

std::string disagreement(const Kernel& kernel, const Parameters& found) {
  const std::vector<Expected> expected = expected_parameters(kernel);
  const auto numbers = [](uint32_t ours, uint32_t theirs) {
    return "expected " + std::to_string(ours) + ", the cubin has " + std::to_string(theirs);
  };
  if (expected.size() > Kernel::kMaxParameters) return std::to_string(expected.size()) + " parameters";
  if (expected.size() != found.each.size()) {
    return "parameters: " + numbers(static_cast<uint32_t>(expected.size()), static_cast<uint32_t>(found.each.size()));
  }
  uint32_t end = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    const std::string which = " of parameter " + std::to_string(i) + ": ";
    const uint32_t offset = rounded_up(found.base + end, expected[i].alignment) - found.base;
    if (found.each[i].size != expected[i].size) return "bytes" + which + numbers(expected[i].size, found.each[i].size);
    if (found.each[i].offset != offset) return "offset" + which + numbers(offset, found.each[i].offset);
    end = offset + expected[i].size;
  }
  if (end != found.size) return "bytes of all parameters: " + numbers(end, found.size);
  return "";
}

int encode_window(const Driver& driver, const WindowForm& form, uint64_t address, int64_t rows, int64_t cols,
                  int64_t row_stride, TensorMap* map) {
  constexpr int kInvalidValue = 1, kNotSupported = 801;
  constexpr int kNoInterleave = 0, kPromotionOf128Bytes = 2, kFillWithZeros = 0;
  constexpr int64_t kSmall = 128 * 1024;
  constexpr uint64_t kBitOfSmall = uint64_t{1} << 21;
  if (driver.encode_tiled == nullptr) return kNotSupported;
  if (rows < 1 || cols < 1 || row_stride < 1) return kInvalidValue;
  const uint64_t sizes[2] = {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows)};
  const uint64_t stride = static_cast<uint64_t>(row_stride) * static_cast<uint64_t>(form.element_bytes);
  const uint64_t strides[2] = {stride, stride * static_cast<uint64_t>(rows)};
  const uint32_t box[2] = {form.box_cols, form.box_rows}, element_strides[2] = {1, 1};
  const int code =
      driver.encode_tiled(map, form.element_type, 2, reinterpret_cast<void*>(address), sizes, strides, box,
                          element_strides, kNoInterleave, form.swizzle, kPromotionOf128Bytes, kFillWithZeros);
  if (code == 0 && form.clears_bit_of_small) {
    // In 32 bits, as Triton counts.
    const uint32_t last = static_cast<uint32_t>(cols - 1) * static_cast<uint32_t>(form.element_bytes) +
                          static_cast<uint32_t>(rows - 1) * static_cast<uint32_t>(stride);
    if (int64_t{static_cast<int32_t>(last)} + 1 < kSmall) map->words[1] &= ~kBitOfSmall;
  }
  return code;
}

TensorMap* MapTable::find(const Driver& driver, const WindowForm& form, uint64_t address, int64_t rows, int64_t cols,
                          int64_t row_stride, int* code) {
  if (entries_.empty()) entries_.resize(kSize);
  const uint64_t mixed = (address / 16 + static_cast<uint64_t>(rows) * 0x9e3779b1) * UINT64_C(0x9e3779b97f4a7c15);
  Entry& entry = entries_[mixed >> 58];
  *code = 0;
  if (entry.address == address && entry.rows == rows && entry.cols == cols && entry.row_stride == row_stride &&
      address != 0) {
    return &entry.map;
  }
  entry.address = 0;
  *code = encode_window(driver, form, address, rows, cols, row_stride, &entry.map);
  if (*code != 0) return nullptr;
  entry.address = address;
  entry.rows = rows;
  entry.cols = cols;
  entry.row_stride = row_stride;
  return &entry.map;
}

}  // namespace bert_fast::host
