// Texts with the tokens that Hugging Face `tokenizers` makes of them (see identity_check.h), by WordPiece.
// tests/tokenization/fuzz_file.py writes the file and describes its format.
//
//     wordpiece_identity FILE [PREFIX...]  the blocks of the file, but those whose names start with one of these
//     wordpiece_identity                   a few texts made up here; what is expected is worked out stage by stage

#include <memory>
#include <string>
#include <utility>

#include "identity_check.h"
#include "wordpiece/tokenizer.h"

namespace {

namespace wp = bert_fast::wordpiece;
using identity::Block;

void set_options(Block& block, wp::TokenizerOptions options) {
  block.shown_options = wordpiece_test::show(options);
  block.make = [options = std::move(options), vocab = block.vocab](bool slow) {
    wp::TokenizerOptions own = options;
    own.stage_by_stage = slow;
    return std::make_unique<wp::Tokenizer>(vocab.views(), own);
  };
}

Block read_block(std::istream& file) {
  Block block;
  wp::TokenizerOptions options;
  block.name = identity::read_string(file);
  options.continuing_prefix = identity::read_string(file);
  wp::NormalizerOptions& normalizer = options.normalizer;
  for (bool* option :
       {&normalizer.clean_text, &normalizer.handle_chinese_chars, &normalizer.strip_accents, &normalizer.lowercase}) {
    *option = identity::read_number<std::uint8_t>(file) != 0;
  }
  options.max_word_chars = identity::read_array(file).at(0);
  options.added_tokens = identity::read_added_tokens(file);
  block.vocab = identity::read_strings(file);
  identity::read_texts(file, block);
  set_options(block, std::move(options));
  return block;
}

Block make_block(unsigned seed) {
  Block block;
  block.name = "made up";
  wp::TokenizerOptions options;
  options.normalizer.lowercase = options.normalizer.strip_accents = seed % 2 == 0;
  for (const char* token :
       {"[UNK]", "a", "ab", "abc", "##a", "##b", "##c", "##bc", "\xC3\xA9", "##\xC3\xA9", "\xE4\xB8\xAD", "!"}) {
    block.vocab.push_back(token);
  }
  set_options(block, options);
  identity::make_up_texts({"a", "b", "C", "abc", " ", "  ", "\t", "!", "\xC3\x89", "e\xCC\x81", "\xE4\xB8\xAD",
                           "\xE2\x80\x8B", "\xF0\x9F\x98\x80", "\xFF", "\xE4\xB8"},
                          seed, block);
  return block;
}

}  // namespace

int main(int argc, char** argv) {
  return identity::run(argc, argv, "wordpiece_identity", "wordpiece texts 2\n", read_block, make_block);
}
