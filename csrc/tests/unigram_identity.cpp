// Texts with the tokens that Hugging Face `tokenizers` makes of them (see identity_check.h), by Unigram models.
// tests/tokenization/unigram_fuzz_file.py writes the file and describes its format.
//
//     unigram_identity FILE [PREFIX...]  the blocks of the file, but those whose names start with one of these
//     unigram_identity                   a few texts made up here; what is expected is worked out text by text

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "identity_check.h"
#include "unigram/tokenizer.h"

namespace {

namespace unigram = bert_fast::unigram;
using identity::Block;
using unigram::NormalizerStep;

void set_options(Block& block, std::vector<double> scores, unigram::TokenizerOptions options) {
  block.shown_options = "added_tokens=" + std::to_string(options.added_tokens.size());
  block.make = [options = std::move(options), scores = std::move(scores), vocab = block.vocab](bool slow) {
    unigram::TokenizerOptions own = options;
    own.whole_texts = slow;
    return std::make_unique<unigram::Tokenizer>(vocab.views(), scores, own);
  };
}

NormalizerStep read_step(std::istream& file) {
  NormalizerStep step;
  const std::string kind = identity::read_string(file), first = identity::read_string(file),
                    second = identity::read_string(file);
  const std::vector<std::uint32_t> numbers = identity::read_array(file);
  if (kind == "charsmap") {
    step.kind = NormalizerStep::Kind::kCharsmap;
  } else if (kind == "strip") {
    step.kind = NormalizerStep::Kind::kStrip;
    step.left = numbers.at(0) != 0;
    step.right = numbers.at(1) != 0;
  } else if (kind == "replace") {
    step.kind = NormalizerStep::Kind::kReplaceText;
    step.pattern = first;
    step.content = second;
  } else if (kind == "replace_spaces") {
    step.kind = NormalizerStep::Kind::kReplaceSpaces;
    step.content = first;
    step.least = numbers.at(0);
  } else if (kind == "replace_whitespace") {
    step.kind = NormalizerStep::Kind::kReplaceWhitespace;
    step.content = first;
  } else if (kind == "lowercase") {
    step.kind = NormalizerStep::Kind::kLowercase;
  } else {
    step.kind = NormalizerStep::Kind::kCompose;
  }
  return step;
}

Block read_block(std::istream& file) {
  Block block;
  unigram::TokenizerOptions options;
  block.name = identity::read_string(file);
  identity::read_string(file);  // the tokenizer.json
  options.model.unk_id = static_cast<std::int32_t>(identity::read_array(file).at(0));
  for (bool* option :
       {&options.model.byte_fallback, &options.whitespace_split, &options.split, &options.split_punctuation}) {
    *option = identity::read_number<std::uint8_t>(file) != 0;
  }
  const std::string replacement = identity::read_string(file), prepend = identity::read_string(file);
  const char* p = replacement.data();
  options.replacement = identity::wp::decode_utf8(p);
  options.prepend = prepend == "always"  ? unigram::Prepend::kAlways
                    : prepend == "first" ? unigram::Prepend::kFirst
                                         : unigram::Prepend::kNever;
  options.charsmap = identity::read_string(file);
  for (std::uint32_t n = identity::read_array(file).at(0); n > 0; --n) options.steps.push_back(read_step(file));
  options.added_tokens = identity::read_added_tokens(file);
  block.vocab = identity::read_strings(file);
  const std::string bytes = identity::read_string(file);
  std::vector<double> scores(bytes.size() / sizeof(double));
  std::memcpy(scores.data(), bytes.data(), scores.size() * sizeof(double));
  identity::read_texts(file, block);
  set_options(block, std::move(scores), std::move(options));
  return block;
}

// Without a character map; <m> takes the whitespace before it along, words are kept up to 23 bytes.
Block make_block(unsigned seed) {
  Block block;
  block.name = "made up";
  unigram::TokenizerOptions options;
  options.whitespace_split = seed % 2 == 0;
  options.steps.resize(1);
  options.steps[0].kind = NormalizerStep::Kind::kReplaceSpaces;
  options.steps[0].content = " ";
  options.added_tokens.push_back({"<m>", 9, false, true, false, false});
  std::vector<double> scores;
  for (const char* piece : {"<unk>", "\xE2\x96\x81",
                            "\xE2\x96\x81"
                            "a",
                            "a", "ab", "b", "\xE2\x96\x81\xC3\xA9", "bc", "\xE4\xB8\xAD"}) {
    block.vocab.push_back(piece);
    scores.push_back(-2.0 - static_cast<double>(scores.size() % 4));
  }
  set_options(block, scores, options);
  identity::make_up_texts({"a", "b", "c", "abc", " ", "  ", "\t", "!", "\xC3\xA9", "e\xCC\x81", "\xE4\xB8\xAD", "<m>",
                           "\xE2\x96\x81", "abcabcabcabcabcabcabcab", "\n", "\xFF", "\xE4\xB8"},
                          seed, block);
  return block;
}

}  // namespace

int main(int argc, char** argv) {
  return identity::run(argc, argv, "unigram_identity", "unigram texts 1\n", read_block, make_block);
}
