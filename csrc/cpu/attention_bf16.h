// Attention without gradients, dropout or bias, whose products are in bf16: queries, keys, values and probabilities are
// rounded to it; scores, softmax and sums are in fp32. A sequence's bits depend neither on the others nor on the number
// of threads.

#ifndef BERT_FAST_CPU_ATTENTION_BF16_H_
#define BERT_FAST_CPU_ATTENTION_BF16_H_

#include "cpu/attention.h"

namespace bert_fast::cpu {

// Whether the instruction set in use has products that make this faster than fp32.
bool runs_attention_bf16();

// As `attention_forward`, of a shape without causal order, bias and tables. Throws as it does.
void attention_forward_bf16(Packed<const float> q, Packed<const float> k, Packed<const float> v, Packed<float> out,
                            const AttentionShape& shape, int num_threads);

}  // namespace bert_fast::cpu

#endif  // BERT_FAST_CPU_ATTENTION_BF16_H_
