#include "host/cubin.h"

#include <cstring>

namespace bert_fast::host {
namespace {

// Of .nv.info.<kernel>: records of a format, an attribute and, in this format, a payload with its size in bytes.
constexpr uint8_t kWithPayload = 0x04;
constexpr uint8_t kWithHalf = 0x03;
constexpr uint8_t kParameterBank = 0x0a;  // symbol, u16 offset, u16 size
constexpr uint8_t kParameter = 0x17;  // u32 index, u16 ordinal, u16 offset, u32 of which the upper 14 bits are the size
constexpr size_t kMaxParameters = 4096;

// A value at an offset of the image; false where the image ends before.
template <class T>
bool read(std::string_view image, uint64_t offset, T* value) {
  if (offset > image.size() || image.size() - offset < sizeof(T)) return false;
  std::memcpy(value, image.data() + offset, sizeof(T));
  return true;
}

struct Section {
  uint32_t name = 0;
  uint64_t offset = 0, size = 0;
};

bool read_section(std::string_view image, uint64_t at, Section* section) {
  return read(image, at, &section->name) && read(image, at + 24, &section->offset) &&
         read(image, at + 32, &section->size) && section->offset <= image.size() &&
         section->size <= image.size() - section->offset;
}

// Whether the name at this place of the table of names is `expected`.
bool is_named(std::string_view image, const Section& names, const Section& section, std::string_view expected) {
  const std::string_view table = image.substr(names.offset, names.size);
  return section.name < table.size() && table.size() - section.name > expected.size() &&
         table.substr(section.name, expected.size()) == expected && table[section.name + expected.size()] == '\0';
}

bool read_records(std::string_view info, Parameters* found) {
  bool has_bank = false;
  for (uint64_t at = 0; at < info.size();) {
    uint8_t format = 0, attribute = 0;
    uint16_t length = 0;
    if (!read(info, at, &format) || !read(info, at + 1, &attribute) || !read(info, at + 2, &length)) return false;
    at += 4;
    if (format != kWithPayload) {
      if (format > kWithHalf) return false;
      continue;
    }
    if (info.size() - at < length) return false;
    const std::string_view payload = info.substr(at, length);
    at += length;
    if (attribute == kParameterBank) {
      uint16_t base = 0, size = 0;
      if (!read(payload, 4, &base) || !read(payload, 6, &size)) return false;
      found->base = base;
      found->size = size;
      has_bank = true;
    } else if (attribute == kParameter) {
      uint16_t ordinal = 0, offset = 0;
      uint32_t bits = 0;
      if (!read(payload, 4, &ordinal) || !read(payload, 6, &offset) || !read(payload, 8, &bits)) return false;
      if (ordinal >= kMaxParameters) return false;
      if (ordinal >= found->each.size()) found->each.resize(ordinal + 1);
      found->each[ordinal] = {offset, bits >> 18};
    }
  }
  return has_bank;
}

}  // namespace

std::string read_parameters(std::string_view image, const std::string& kernel, Parameters* found) {
  uint64_t table = 0;
  uint16_t entry_size = 0, num_sections = 0, names_index = 0;
  *found = {};
  if (image.substr(0, 5) != std::string_view("\x7f"
                                             "ELF\x02") ||
      !read(image, 40, &table) || !read(image, 58, &entry_size) || !read(image, 60, &num_sections) ||
      !read(image, 62, &names_index) || table > image.size()) {
    return "the image is no 64-bit ELF file";
  }
  Section names;
  if (!read_section(image, table + uint64_t{names_index} * entry_size, &names)) return "the image has no section names";
  for (uint64_t i = 0; i < num_sections; i++) {
    Section section;
    if (!read_section(image, table + i * entry_size, &section)) continue;  // sections without bytes may lie outside
    if (!is_named(image, names, section, ".nv.info." + kernel)) continue;
    if (!read_records(image.substr(section.offset, section.size), found)) return "its attributes cannot be read";
    return "";
  }
  return "the image has no attributes of such a kernel";
}

}  // namespace bert_fast::host
