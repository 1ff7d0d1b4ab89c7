#include "wordpiece/units.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "wordpiece/cuts.h"
#include "wordpiece/pool.h"
#include "wordpiece/utf8.h"

namespace bert_fast::wordpiece {
namespace {

// What a text costs besides its bytes, in bytes; 10^6 empty texts are work as well.
constexpr std::size_t kTextBytes = 16;
// More than the bytes of a token, on an average: what is read of a text for a given number of tokens.
constexpr std::size_t kTokenBytes = 8;

// A thread more costs some microseconds, and up to 50 where it slept: what it takes to encode a few KB.
constexpr std::size_t kMinBytesPerThread = 24 * 1024;
// Units are small against a thread's share, so that threads end together, and large against the cost of handing them
// out (0.1 microseconds).
constexpr std::size_t kUnitsPerThread = 16;
constexpr std::size_t kMinUnitBytes = 4 * 1024;
constexpr std::size_t kMaxUnitBytes = 64 * 1024;

// An arena that has grown beyond this is not kept.
constexpr std::size_t kKeptTokens = 128 * 1024;
constexpr std::size_t kKeptTextBytes = 128 * 1024;

std::size_t cost_of(const TextView& text, std::size_t max_tokens) {
  std::size_t bytes = text.size_bytes();
  if (max_tokens < bytes / kTokenBytes) bytes = max_tokens * kTokenBytes;
  return bytes + kTextBytes;
}

void push_special(std::int32_t id, const EncodeOptions& wanted, Tokens& out) {
  out.ids.push_back(id);
  if (wanted.offsets) out.offsets.append(2, 0);
  if (wanted.word_ids) out.word_ids.push_back(-1);
}

// What a giant text needs besides its tokens is not kept.
void encode_text(const TextTokenizer& tokenizer, const TextView& text, const EncodeOptions& wanted, Arena& arena,
                 Tokens& out) {
  if (text.size_bytes() <= kKeptTextBytes) return tokenizer.encode(text, wanted, arena.scratch, out);
  Scratch scratch;
  tokenizer.encode(text, wanted, scratch, out);
}

void encode_part(const TextTokenizer& tokenizer, TextView part, const EncodeOptions& wanted, Arena& arena, Tokens& out,
                 Unit& unit) {
  const std::size_t first = out.ids.size();
  std::string repaired;
  if (wanted.offsets && part.form == TextView::Form::kUtf8) {  // code points are counted as they are repaired
    const std::string_view valid = to_utf8(part, repaired);
    part = {valid.data(), valid.size(), TextView::Form::kUtf8};
    unit.num_chars = count_code_points(valid);
  } else {
    unit.num_chars = part.length;
  }
  encode_text(tokenizer, part, wanted, arena, out);
  const bool has_words = wanted.word_ids && out.ids.size() > first;
  unit.num_words = has_words ? static_cast<std::size_t>(out.word_ids.back()) + 1 : 0;
}

}  // namespace

std::size_t total_cost(const TextView* texts, std::size_t num_texts, std::size_t max_tokens,
                       std::size_t max_batch_tokens) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < num_texts && total / kTokenBytes < max_batch_tokens; ++i) {
    total += cost_of(texts[i], max_tokens);
  }
  return total;
}

WorkPlan plan_work(std::size_t num_bytes, std::size_t num_threads, bool is_limited) {
  if (num_threads == 0) {
    num_threads = num_bytes / kMinBytesPerThread;
    // Asking the system for its processors takes longer than encoding a sentence: only where it matters.
    if (num_threads > 1) num_threads = std::min(num_threads, available_processors());
  }
  num_threads = std::clamp<std::size_t>(num_threads, 1, kMaxThreads);
  if (num_threads == 1 && !is_limited) return {1, kMaxUnitBytes};
  const std::size_t unit_bytes = std::clamp(num_bytes / num_threads / kUnitsPerThread, kMinUnitBytes, kMaxUnitBytes);
  return {std::max<std::size_t>(1, std::min(num_threads, num_bytes / unit_bytes)), unit_bytes};
}

UnitPlanner::UnitPlanner(const TextTokenizer& tokenizer, const TextView* texts, std::size_t num_texts,
                         const EncodeOptions& wanted, std::size_t unit_bytes, bool cut_long)
    : tokenizer_(tokenizer),
      texts_(texts),
      num_texts_(num_texts),
      wanted_(wanted),
      unit_bytes_(unit_bytes),
      cut_long_(cut_long && tokenizer.cuts_texts(wanted)) {}

// A text has at most as many tokens as units: a limit from there on cuts nothing off, and parts need not know of it.
// Texts that are too long for offsets are left whole, for the tokenizer to say so.
bool UnitPlanner::is_cut(const TextView& text) const {
  constexpr std::size_t kMaxOffset = std::numeric_limits<std::int32_t>::max();
  return cut_long_ && text.size_bytes() > 2 * unit_bytes_ && text.length <= wanted_.max_tokens &&
         (text.length <= kMaxOffset || !(wanted_.offsets || wanted_.word_ids));
}

void UnitPlanner::next(std::size_t max_units, std::vector<Unit>& units) {
  units.clear();
  while (text_ < num_texts_ && units.size() < max_units) {
    if (is_cut(texts_[text_])) {
      plan_parts(max_units, units);
      continue;
    }
    Unit unit;
    unit.first_text = text_;
    std::size_t bytes = 0;
    do {
      bytes += cost_of(texts_[text_++], wanted_.max_tokens);
    } while (text_ < num_texts_ && bytes + cost_of(texts_[text_], wanted_.max_tokens) / 2 < unit_bytes_ &&
             !is_cut(texts_[text_]));
    unit.last_text = text_;
    units.push_back(unit);
  }
}

// Parts start at the first safe place behind even steps. One that is not found soon is done without, so that looking
// for it costs little: the part gets longer.
void UnitPlanner::plan_parts(std::size_t max_units, std::vector<Unit>& units) {
  const TextView& text = texts_[text_];
  const std::size_t step = std::max<std::size_t>(1, unit_bytes_ * text.length / text.size_bytes());
  while (units.size() < max_units && begin_ < text.length) {
    std::size_t end = kNoCut;
    for (std::size_t from = begin_ + step; end == kNoCut && from + step / 2 < text.length; from += step) {
      end = find_cut(tokenizer_, text, from, from + step / 4);
    }
    Unit unit;
    unit.first_text = text_;
    unit.last_text = text_ + 1;
    unit.is_part = true;
    unit.begin = begin_;
    unit.end = std::min(end, text.length);
    unit.ends_text = unit.end == text.length;
    units.push_back(unit);
    begin_ = unit.end;
  }
  if (begin_ < text.length) return;
  begin_ = 0;
  ++text_;
}

Workspace::Lease::Lease(std::size_t num_arenas)
    : workspace_([]() -> Workspace& {
        thread_local Workspace own;
        return own;
      }()) {
  while (workspace_.arenas.size() < num_arenas) workspace_.arenas.emplace_back();
}

Workspace::Lease::~Lease() {
  for (Arena& arena : workspace_.arenas) {
    Tokens& tokens = arena.tokens;
    if (tokens.ids.capacity() > kKeptTokens || tokens.offsets.capacity() > 2 * kKeptTokens) tokens = Tokens();
    arena.clear();
  }
}

void encode_unit(const TextTokenizer& tokenizer, const TextView* texts, const EncodeOptions& wanted,
                 const Around& around, Arena& arena, Tokens& out, Unit& unit, std::int64_t* ends) {
  unit.first_token = out.ids.size();
  for (std::size_t i = unit.first_text; i < unit.last_text; ++i) {
    if (around.on && unit.begin == 0) push_special(around.cls, wanted, out);
    if (unit.is_part) {
      encode_part(tokenizer, slice(texts[i], unit.begin, unit.end), wanted, arena, out, unit);
    } else {
      encode_text(tokenizer, texts[i], wanted, arena, out);
    }
    if (!unit.ends_text) continue;
    if (around.on) push_special(around.sep, wanted, out);
    ends[i + 1] = static_cast<std::int64_t>(out.ids.size() - unit.first_token);
  }
  unit.num_tokens = out.ids.size() - unit.first_token;
}

}  // namespace bert_fast::wordpiece
