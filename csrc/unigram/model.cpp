#include "unigram/model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "wordpiece/kernels.h"
#include "wordpiece/utf8.h"

namespace bert_fast::unigram {
namespace {

constexpr double kUnkPenalty = 10.0;
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

wordpiece::Trie make_trie(const std::vector<std::string_view>& vocab) {
  std::vector<wordpiece::Trie::Entry> entries;
  entries.reserve(vocab.size());
  for (std::size_t id = 0; id < vocab.size(); ++id) {
    if (!vocab[id].empty()) entries.push_back({vocab[id], static_cast<std::int32_t>(id)});
  }
  try {
    return wordpiece::Trie(std::move(entries), {});
  } catch (const wordpiece::Trie::Duplicate& two) {
    throw std::invalid_argument("vocab: the token '" + std::string(vocab[static_cast<std::size_t>(two.first_id)]) +
                                "' stands at " + std::to_string(two.first_id) + " and at " +
                                std::to_string(two.second_id));
  }
}

std::vector<std::int32_t> find_byte_tokens(const wordpiece::Trie& trie) {
  std::vector<std::int32_t> ids(256, -1);
  for (unsigned byte = 0; byte < 256; ++byte) {
    char name[8];
    const auto size = static_cast<std::size_t>(std::snprintf(name, sizeof(name), "<0x%02X>", byte));
    std::int32_t id = -1;
    if (trie.longest_prefix({name, size}, id) == size) ids[byte] = id;
  }
  return ids;
}

}  // namespace

Model::Model(const std::vector<std::string_view>& vocab, const std::vector<double>& scores, const ModelOptions& options)
    : trie_(make_trie(vocab)), unk_id_(options.unk_id) {
  if (scores.size() != vocab.size()) {
    throw std::invalid_argument("scores: expected one for each of the " + std::to_string(vocab.size()) +
                                " tokens, got " + std::to_string(scores.size()));
  }
  if (unk_id_ < 0 || static_cast<std::size_t>(unk_id_) >= vocab.size()) {
    throw std::invalid_argument("unk_id: expected an id of the vocabulary, got " + std::to_string(unk_id_));
  }
  for (std::size_t id = 0; id < scores.size(); ++id) {
    if (std::isfinite(scores[id])) continue;
    throw std::invalid_argument("scores[" + std::to_string(id) + "]: expected a finite number");
  }
  unk_score_ = *std::min_element(scores.begin(), scores.end()) - kUnkPenalty;
  if (options.byte_fallback) byte_ids_ = find_byte_tokens(trie_);
  ids_ = trie_.number_by_place();
  scores_.reserve(ids_.size());
  for (const std::int32_t id : ids_) scores_.push_back(scores[static_cast<std::size_t>(id)]);
}

void Model::split(std::string_view word, Lattice& lattice) const {
  std::vector<Lattice::Node>& nodes = lattice.nodes;
  nodes.assign(word.size() + 1, {0.0, kNone, 0});
  const wordpiece::TrieView trie = trie_.view();
  const auto offer = [&](std::size_t start, std::size_t stop, double score, std::int32_t number) {
    Lattice::Node& node = nodes[stop];
    if (node.start == kNone || score > node.score) node = {score, static_cast<std::uint32_t>(start), number};
  };
  for (std::size_t start = 0; start < word.size();) {
    const double before = nodes[start].score;
    const std::size_t char_size = wordpiece::utf8_length(static_cast<unsigned char>(word[start]));
    bool is_known = false;
    wordpiece::TrieNode node = trie.nodes[wordpiece::TrieView::kStartRoot];
    for (std::size_t i = start; i < word.size(); ++i) {
      const auto byte = static_cast<unsigned char>(word[i]);
      const std::uint32_t child = node.base() + byte;
      node = trie.nodes[child];
      if (!node.has_label(byte)) break;
      if (!node.ends_token()) continue;
      const std::int32_t number = trie.ids[child];
      offer(start, i + 1, scores_[static_cast<std::size_t>(number)] + before, number);
      is_known = is_known || i + 1 - start == char_size;
    }
    if (!is_known) offer(start, start + char_size, unk_score_ + before, kUnknown);
    start += char_size;
  }

  // Back along the best pieces.
  std::vector<Piece>& pieces = lattice.pieces;
  pieces.clear();
  for (auto stop = static_cast<std::uint32_t>(word.size()); stop > 0; stop = nodes[stop].start) {
    const Lattice::Node& node = nodes[stop];
    const std::int32_t id = node.number == kUnknown ? unk_id_ : ids_[static_cast<std::size_t>(node.number)];
    if (id == unk_id_ && !pieces.empty() && pieces.back().id == unk_id_) {
      pieces.back().start = node.start;
    } else {
      pieces.push_back({id, node.start, stop});
    }
  }
  std::reverse(pieces.begin(), pieces.end());
  if (std::none_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return piece.id == unk_id_; })) return;
  const std::vector<Piece> found = std::exchange(pieces, {});
  for (const Piece& piece : found) {
    if (piece.id == unk_id_) {
      emit(word, piece.start, piece.stop, pieces);
    } else {
      pieces.push_back(piece);
    }
  }
}

// An unknown piece: several characters together may be a token though none of them is; else its bytes, or unk_id.
void Model::emit(std::string_view word, std::uint32_t start, std::uint32_t stop, std::vector<Piece>& pieces) const {
  const std::string_view text = word.substr(start, stop - start);
  std::int32_t number = -1;
  if (trie_.longest_prefix(text, number) == text.size()) {
    pieces.push_back({ids_[static_cast<std::size_t>(number)], start, stop});
    return;
  }
  const auto byte_id = [&](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
  if (byte_ids_.empty() || std::any_of(text.begin(), text.end(), [&](char byte) { return byte_id(byte) < 0; })) {
    pieces.push_back({unk_id_, start, stop});
    return;
  }
  for (const char byte : text) pieces.push_back({byte_id(byte), start, stop});
}

}  // namespace bert_fast::unigram
