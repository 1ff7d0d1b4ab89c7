#include "bert_fast/wordpiece.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "wordpiece/batch.h"
#include "wordpiece/tokenizer.h"
#include "wordpiece/utf8.h"

namespace bert_fast {
namespace {

std::optional<std::int32_t> find(const std::vector<std::string>& vocab, std::string_view token) {
  const auto found = std::find(vocab.begin(), vocab.end(), token);
  if (found == vocab.end()) return std::nullopt;
  return static_cast<std::int32_t>(found - vocab.begin());
}

wordpiece::TokenizerOptions core_options(const std::vector<std::string>& vocab, const WordPieceOptions& options) {
  wordpiece::TokenizerOptions core;
  core.normalizer.clean_text = options.clean_text;
  core.normalizer.handle_chinese_chars = options.split_chinese_chars;
  core.normalizer.lowercase = options.lowercase;
  core.normalizer.strip_accents = options.strip_accents.value_or(options.lowercase);
  core.unk_token = options.unk_token;
  core.continuing_prefix = options.continuing_prefix;
  core.max_word_chars = options.max_word_chars;
  for (const std::string& token : options.special_tokens) {
    wordpiece::AddedToken added;
    added.content = token;
    const std::optional<std::int32_t> id = find(vocab, token);
    if (!id) continue;
    added.id = *id;
    core.added_tokens.push_back(std::move(added));
  }
  return core;
}

std::vector<std::string_view> checked_views(const std::vector<std::string>& vocab) {
  for (std::size_t i = 0; i < vocab.size(); ++i) {
    if (wordpiece::valid_utf8_prefix(vocab[i]) == vocab[i].size()) continue;
    throw std::invalid_argument("vocab: expected UTF-8, got another byte in the token at position " +
                                std::to_string(i));
  }
  return {vocab.begin(), vocab.end()};
}

std::string read_file(const std::string& path) {
  const auto fail = [&](const char* what) -> std::runtime_error {
    return std::runtime_error("vocab: cannot " + std::string(what) + " " + path + ": " + std::strerror(errno));
  };
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
  if (!file) throw fail("open");
  std::string content;
  char block[65536];
  while (const std::size_t size = std::fread(block, 1, sizeof(block), file.get())) content.append(block, size);
  if (std::ferror(file.get())) throw fail("read");
  return content;
}

std::vector<std::string> split_lines(std::string_view content) {
  std::vector<std::string> lines;
  while (!content.empty()) {
    const std::size_t size = std::min(content.find('\n'), content.size());
    std::string_view line = content.substr(0, size);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    lines.emplace_back(line);
    content.remove_prefix(std::min(size + 1, content.size()));
  }
  return lines;
}

template <typename T>
Array<T> take(wordpiece::Buffer<T>& values) {
  const std::size_t size = values.size();
  return Array<T>(values.release(), size);
}

}  // namespace

struct WordPiece::Model {
  Model(std::vector<std::string>&& tokens, const WordPieceOptions& options)
      : vocab(std::move(tokens)),
        cls_token(options.cls_token),
        sep_token(options.sep_token),
        cls(find(vocab, cls_token)),
        sep(find(vocab, sep_token)),
        tokenizer(checked_views(vocab), core_options(vocab, options)) {}

  wordpiece::Batch encode(const wordpiece::TextView* texts, std::size_t num_texts, const EncodeOptions& options) const {
    wordpiece::BatchOptions core;
    core.encode = {options.offsets, options.word_ids, options.max_tokens};
    core.num_threads = options.num_threads;
    if (options.add_special_tokens) {
      if (!cls || !sep) {
        throw std::invalid_argument("add_special_tokens: expected '" + cls_token + "' and '" + sep_token +
                                    "' in the vocabulary, got none of '" + (cls ? sep_token : cls_token) + "'");
      }
      core.around = {true, *cls, *sep};
    }
    wordpiece::Batch batch;
    wordpiece::encode_batch(tokenizer, texts, num_texts, core, batch);
    return batch;
  }

  const std::vector<std::string> vocab;
  const std::string cls_token;
  const std::string sep_token;
  const std::optional<std::int32_t> cls;
  const std::optional<std::int32_t> sep;
  const wordpiece::Tokenizer tokenizer;
};

WordPiece WordPiece::from_file(const std::string& path, const WordPieceOptions& options) {
  const std::string content = read_file(path);
  if (content.compare(0, 3, "\xEF\xBB\xBF") == 0) {
    throw std::invalid_argument("vocab: " + path + " starts with a byte order mark; save it as UTF-8 without one");
  }
  return WordPiece(split_lines(content), options);
}

WordPiece::WordPiece(std::vector<std::string> vocab, const WordPieceOptions& options)
    : model_(std::make_shared<const Model>(std::move(vocab), options)) {}

Encoding WordPiece::encode(std::string_view text, const EncodeOptions& options) const {
  const wordpiece::TextView view = {text.data(), text.size(), wordpiece::TextView::Form::kUtf8};
  wordpiece::Batch batch = model_->encode(&view, 1, options);
  return {take(batch.tokens.ids), take(batch.tokens.offsets), take(batch.tokens.word_ids)};
}

BatchEncoding WordPiece::encode_batch(const std::string_view* texts, std::size_t num_texts,
                                      const EncodeOptions& options) const {
  std::vector<wordpiece::TextView> views;
  views.reserve(num_texts);
  for (std::size_t i = 0; i < num_texts; ++i) {
    views.push_back({texts[i].data(), texts[i].size(), wordpiece::TextView::Form::kUtf8});
  }
  wordpiece::Batch batch = model_->encode(views.data(), num_texts, options);
  return {take(batch.tokens.ids), take(batch.tokens.offsets), take(batch.tokens.word_ids), take(batch.cu_seqlens)};
}

std::size_t WordPiece::vocab_size() const { return model_->vocab.size(); }

std::string_view WordPiece::token(std::int32_t id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= model_->vocab.size()) {
    throw std::out_of_range("id: expected a number from 0 to " + std::to_string(model_->vocab.size() - 1) + ", got " +
                            std::to_string(id));
  }
  return model_->vocab[static_cast<std::size_t>(id)];
}

std::optional<std::int32_t> WordPiece::id(std::string_view token) const { return find(model_->vocab, token); }

}  // namespace bert_fast
