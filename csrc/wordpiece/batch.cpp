#include "wordpiece/batch.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

namespace bert_fast::wordpiece {
namespace {

// A unit of work is large against the cost of handing it out (one atomic addition) and small against a batch, so that
// threads end together. Starting a thread costs some 30 microseconds: as long as encoding a few kilobytes.
constexpr std::size_t kUnitBytes = 32 * 1024;
constexpr std::size_t kMinBytesPerThread = 128 * 1024;

struct Unit {
  std::size_t first_text;
  std::size_t last_text;  // exclusive
  Batch result;           // cu_seqlens: end of each text's tokens within the unit
};

std::vector<Unit> make_units(const std::vector<TextView>& texts) {
  std::vector<Unit> units;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (i == 0 || bytes >= kUnitBytes) {
      units.push_back({i, i, {}});
      bytes = 0;
    }
    units.back().last_text = i + 1;
    bytes += texts[i].size_bytes();
  }
  return units;
}

// Room for the tokens of ordinary text (4 to 5 bytes each in English), so that vectors seldom grow.
void reserve(Tokens& tokens, std::size_t num_bytes, const EncodeOptions& wanted) {
  const std::size_t num_tokens = num_bytes / 4 + 16;
  tokens.ids.reserve(num_tokens);
  if (wanted.offsets) tokens.offsets.reserve(2 * num_tokens);
  if (wanted.word_ids) tokens.word_ids.reserve(num_tokens);
}

void encode_range(const Tokenizer& tokenizer, const std::vector<TextView>& texts, std::size_t first, std::size_t last,
                  const EncodeOptions& wanted, Scratch& scratch, Batch& out) {
  for (std::size_t i = first; i < last; ++i) {
    tokenizer.encode(texts[i], wanted, scratch, out.tokens);
    out.cu_seqlens.push_back(static_cast<std::int64_t>(out.tokens.ids.size()));
  }
}

void append(Buffer<std::int32_t>& to, const Buffer<std::int32_t>& from) { to.append(from.data(), from.size()); }

void join_units(const std::vector<Unit>& units, Batch& out) {
  std::size_t num_tokens = 0;
  for (const Unit& unit : units) num_tokens += unit.result.tokens.ids.size();
  out.tokens.ids.reserve(num_tokens);
  for (const Unit& unit : units) {
    const std::int64_t start = out.cu_seqlens.back();
    for (const std::int64_t end : unit.result.cu_seqlens) out.cu_seqlens.push_back(start + end);
    append(out.tokens.ids, unit.result.tokens.ids);
    append(out.tokens.offsets, unit.result.tokens.offsets);
    append(out.tokens.word_ids, unit.result.tokens.word_ids);
  }
}

}  // namespace

std::size_t plan_threads(std::size_t num_bytes, std::size_t num_texts, std::size_t num_threads) {
  if (num_threads == 0) {
    num_threads = num_bytes / kMinBytesPerThread;
    // Asking the system for its processors takes longer than encoding a sentence: ask only where it matters.
    if (num_threads > 1) num_threads = std::min<std::size_t>(num_threads, std::thread::hardware_concurrency());
  }
  return std::max<std::size_t>(1, std::min(num_threads, num_texts));
}

void encode_batch(const Tokenizer& tokenizer, const std::vector<TextView>& texts, const EncodeOptions& wanted,
                  std::size_t num_threads, Batch& out) {
  out.cu_seqlens.clear();
  out.cu_seqlens.reserve(texts.size() + 1);
  out.cu_seqlens.push_back(0);
  std::size_t num_bytes = 0;
  for (const TextView& text : texts) num_bytes += text.size_bytes();
  num_threads = plan_threads(num_bytes, texts.size(), num_threads);
  if (num_threads == 1) {
    Scratch scratch;
    reserve(out.tokens, num_bytes, wanted);
    encode_range(tokenizer, texts, 0, texts.size(), wanted, scratch, out);
    return;
  }

  std::vector<Unit> units = make_units(texts);
  num_threads = std::min(num_threads, units.size());
  std::atomic<std::size_t> next_unit{0};
  std::vector<std::exception_ptr> errors(num_threads);
  const auto work = [&](std::size_t thread) {
    try {
      Scratch scratch;
      for (std::size_t i; (i = next_unit.fetch_add(1, std::memory_order_relaxed)) < units.size();) {
        encode_range(tokenizer, texts, units[i].first_text, units[i].last_text, wanted, scratch, units[i].result);
      }
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(num_threads - 1);
  try {
    while (threads.size() + 1 < num_threads) threads.emplace_back(work, threads.size() + 1);
  } catch (const std::system_error&) {
    // The system gives no further thread: those there are do the work.
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  join_units(units, out);
}

}  // namespace bert_fast::wordpiece
