#include "wordpiece/kernels.h"
#include "wordpiece/word_hash.h"

namespace bert_fast::wordpiece {
namespace {

#include "wordpiece/word_kernels_body.h"

constexpr WordKernels kKernels = {find, split};

}  // namespace

const WordKernels& portable_word_kernels() { return kKernels; }

}  // namespace bert_fast::wordpiece
