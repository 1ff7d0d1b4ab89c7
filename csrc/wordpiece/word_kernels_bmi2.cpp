// Compiled without vector registers: GCC would keep the many addresses of these loops there, and moving them back costs
// more than reading them from memory.
#include "wordpiece/kernels.h"
#include "wordpiece/word_hash.h"

namespace bert_fast::wordpiece {
namespace {

#include "wordpiece/word_kernels_body.h"

constexpr WordKernels kKernels = {find, split};

}  // namespace

const WordKernels& bmi2_word_kernels() { return kKernels; }

}  // namespace bert_fast::wordpiece
