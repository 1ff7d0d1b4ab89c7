// Tokenizes the lines of standard input, all at once: for each line its tokens, with the place of each in the line.
//
//     tokenize_lines vocab.txt < text.txt
//     [CLS] hello(0-5) ,(5-6) world(7-12) [SEP]

#include <bert_fast/wordpiece.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: tokenize_lines vocab.txt < text.txt\n";
    return 2;
  }
  try {
    const bert_fast::WordPiece tokenizer = bert_fast::WordPiece::from_file(argv[1]);
    std::vector<std::string> lines;
    for (std::string line; std::getline(std::cin, line);) lines.push_back(line);

    bert_fast::EncodeOptions options;
    options.add_special_tokens = true;
    options.offsets = true;
    const bert_fast::BatchEncoding batch = tokenizer.encode_batch(lines, options);

    for (std::size_t i = 0; i < lines.size(); ++i) {
      for (std::int64_t k = batch.boundaries[i]; k < batch.boundaries[i + 1]; ++k) {
        const auto token = static_cast<std::size_t>(k);
        const std::int32_t start = batch.offsets[2 * token], stop = batch.offsets[2 * token + 1];
        std::cout << (k == batch.boundaries[i] ? "" : " ") << tokenizer.token(batch.ids[token]);
        if (stop > start) std::cout << '(' << start << '-' << stop << ')';
      }
      std::cout << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << "tokenize_lines: " << error.what() << '\n';
    return 1;
  }
}
