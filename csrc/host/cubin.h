// Reads from a cubin (an ELF file) how the parameters of a kernel lie in the memory that a launch fills.

#ifndef BERT_FAST_HOST_CUBIN_H_
#define BERT_FAST_HOST_CUBIN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bert_fast::host {

struct Parameter {
  uint32_t offset = 0;  // bytes from the first one's place
  uint32_t size = 0;    // bytes
};

struct Parameters {
  std::vector<Parameter> each;
  uint32_t base = 0;  // where they start in their bank of constant memory; alignments count from the bank's start
  uint32_t size = 0;  // of all
};

// Empty if they were read, else why not. The image may be anything.
std::string read_parameters(std::string_view image, const std::string& kernel, Parameters* found);

}  // namespace bert_fast::host

#endif  // BERT_FAST_HOST_CUBIN_H_
