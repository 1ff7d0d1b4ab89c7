#include "wordpiece/batch.h"

#include <algorithm>
#include <cstring>

#include "wordpiece/dispatch.h"
#include "wordpiece/pool.h"

namespace bert_fast::wordpiece {
namespace {

// Units that are encoded before they are joined, for each thread: what is joined is still in the cache, and little
// memory holds tokens twice; but at the end of each round threads wait for the last one.
constexpr std::size_t kUnitsPerRound = 32;
// The same where max_batch_tokens may end the batch: what is encoded beyond it is lost.
constexpr std::size_t kUnitsPerLimitedRound = 4;

// Gives units their places, in order, rounds one after the other.
class Placer {
 public:
  void place(Unit& unit) {
    if (unit.begin == 0) chars_ = words_ = 0;
    unit.place = num_tokens_;
    unit.chars_before = static_cast<std::int32_t>(chars_);
    unit.words_before = static_cast<std::int32_t>(words_);
    num_tokens_ += unit.num_tokens;
    chars_ += unit.num_chars;
    words_ += unit.num_words;
  }
  std::size_t num_tokens() const { return num_tokens_; }

 private:
  std::size_t num_tokens_ = 0;
  std::size_t chars_ = 0;
  std::size_t words_ = 0;
};

// to[i] = from[i] + shift; `to` may be `from`.
void copy_shifted(const std::int32_t* from, std::size_t count, std::int32_t shift, std::int32_t* to) {
  if (shift != 0) {
    for (std::size_t i = 0; i < count; ++i) to[i] = from[i] + shift;
  } else if (to != from && count != 0) {
    std::memcpy(to, from, count * sizeof(*to));
  }
}

// Ids of a unit from an arena to their place in the batch.
void place_ids(const Unit& unit, const Tokens& from, const BatchOptions& options, Batch& out) {
  const std::int32_t* ids = from.ids.data() + unit.first_token;
  if (options.wide_ids) {
    kernels().widen(ids, unit.num_tokens, out.wide_ids.data() + unit.place);
  } else {
    copy_shifted(ids, unit.num_tokens, 0, out.tokens.ids.data() + unit.place);
  }
}

// Everything else of a unit. `from` may be out.tokens, if the unit is in its place there.
void place_others(const Unit& unit, const Tokens& from, const BatchOptions& options, Batch& out) {
  for (std::size_t i = unit.first_text; unit.ends_text && i < unit.last_text; ++i) {
    out.cu_seqlens[i + 1] += static_cast<std::int64_t>(unit.place);
  }
  // The special token behind the last part is not shifted.
  const std::size_t unshifted = options.around.on && unit.ends_text && unit.begin > 0 ? 1 : 0;
  const auto copy = [&](const Buffer<std::int32_t>& source, Buffer<std::int32_t>& target, std::size_t per_token,
                        std::int32_t shift) {
    const std::int32_t* values = source.data() + per_token * unit.first_token;
    std::int32_t* to = target.data() + per_token * unit.place;
    const std::size_t count = per_token * (unit.num_tokens - unshifted);
    copy_shifted(values, count, shift, to);
    copy_shifted(values + count, per_token * unshifted, 0, to + count);
  };
  if (options.encode.offsets) copy(from.offsets, out.tokens.offsets, 2, unit.chars_before);
  if (options.encode.word_ids) copy(from.word_ids, out.tokens.word_ids, 1, unit.words_before);
}

// Calls function(buffer, values per token) for each output that is wanted.
template <typename Function>
void for_each_output(const BatchOptions& options, Batch& out, Function function) {
  if (options.wide_ids) {
    function(out.wide_ids, 1);
  } else {
    function(out.tokens.ids, 1);
  }
  if (options.encode.offsets) function(out.tokens.offsets, 2);
  if (options.encode.word_ids) function(out.tokens.word_ids, 1);
}

// Room for the tokens of ordinary text (4 to 5 bytes each in English), so that buffers seldom grow.
void reserve(const BatchOptions& options, std::size_t num_bytes, Batch& out) {
  for_each_output(options, out,
                  [&](auto& values, std::size_t per_token) { values.reserve(per_token * (num_bytes / 4 + 16)); });
}

bool is_limited(const BatchOptions& options) { return options.max_batch_tokens != BatchOptions{}.max_batch_tokens; }

// How many texts are complete behind the last one of some units.
std::size_t num_complete(const Unit& unit) { return unit.ends_text ? unit.last_text : unit.first_text; }

// One thread, and ids as the tokenizer writes them: they are where they belong at once. Returns how many texts
// there are.
std::size_t encode_in_place(const TextTokenizer& tokenizer, const TextView* texts, const BatchOptions& options,
                            UnitPlanner& planner, Workspace& workspace, Batch& out) {
  std::vector<Unit>& units = workspace.units;
  Placer placer;
  std::size_t num_texts = 0;
  for (planner.next(1, units); !units.empty(); planner.next(1, units)) {
    encode_unit(tokenizer, texts, options.encode, options.around, workspace.arenas[0], out.tokens, units[0],
                out.cu_seqlens.data());
    placer.place(units[0]);
    place_others(units[0], out.tokens, options, out);
    num_texts = num_complete(units[0]);
    if (num_texts > 0 && placer.num_tokens() > options.max_batch_tokens) break;
  }
  return num_texts;
}

// The same for other outputs, and several threads.
std::size_t encode_in_rounds(const TextTokenizer& tokenizer, const TextView* texts, const BatchOptions& options,
                             std::size_t num_threads, UnitPlanner& planner, Workspace& workspace, Batch& out) {
  const std::size_t units_per_round =
      num_threads == 1 ? 1 : num_threads * (is_limited(options) ? kUnitsPerLimitedRound : kUnitsPerRound);
  std::vector<Unit>& units = workspace.units;
  Placer placer;
  std::size_t num_texts = 0;
  for (planner.next(units_per_round, units); !units.empty(); planner.next(units_per_round, units)) {
    for (Arena& arena : workspace.arenas) arena.clear();
    parallel_for(units.size(), num_threads, [&](std::size_t index, std::size_t worker) {
      Arena& arena = workspace.arenas[worker];
      units[index].worker = worker;
      arena.units.push_back(index);
      encode_unit(tokenizer, texts, options.encode, options.around, arena, arena.tokens, units[index],
                  out.cu_seqlens.data());
    });
    for (Unit& unit : units) placer.place(unit);
    for_each_output(options, out, [&](auto& values, std::size_t per_token) {
      const std::size_t added = per_token * placer.num_tokens() - values.size();
      values.room(added);
      values.commit(added);
    });
    // Each thread copies its own units first, which its cache holds, then what others have left.
    parallel_for(num_threads, num_threads, [&](std::size_t, std::size_t worker) {
      for (std::size_t k = 0; k < num_threads; ++k) {
        Arena& arena = workspace.arenas[(worker + k) % num_threads];
        for (std::size_t i; (i = arena.next_unit.fetch_add(1, std::memory_order_relaxed)) < arena.units.size();) {
          const Unit& unit = units[arena.units[i]];
          place_ids(unit, arena.tokens, options, out);
          place_others(unit, arena.tokens, options, out);
        }
      }
    });
    num_texts = num_complete(units.back());
    if (num_texts > 0 && placer.num_tokens() > options.max_batch_tokens) break;
  }
  return num_texts;
}

// Leaves out the texts at the end that exceed max_batch_tokens; `num_texts` are there.
void cut_batch(const BatchOptions& options, std::size_t num_texts, Batch& out) {
  const std::int64_t* ends = out.cu_seqlens.data();
  if (num_texts > 1 && static_cast<std::size_t>(ends[num_texts]) > options.max_batch_tokens) {
    const auto limit = static_cast<std::int64_t>(options.max_batch_tokens);
    num_texts = static_cast<std::size_t>(std::upper_bound(ends + 2, ends + num_texts, limit) - ends) - 1;
  }
  const auto num_tokens = static_cast<std::size_t>(ends[num_texts]);
  out.cu_seqlens.truncate(num_texts + 1);
  for_each_output(options, out, [&](auto& values, std::size_t per_token) { values.truncate(per_token * num_tokens); });
}

}  // namespace

void encode_batch(const TextTokenizer& tokenizer, const TextView* texts, std::size_t num_texts,
                  const BatchOptions& options, Batch& out) {
  for (auto* values : {&out.tokens.ids, &out.tokens.offsets, &out.tokens.word_ids}) values->clear();
  for (auto* values : {&out.wide_ids, &out.cu_seqlens}) values->clear();
  out.cu_seqlens.append(num_texts + 1, 0);

  const std::size_t num_bytes = total_cost(texts, num_texts, options.encode.max_tokens, options.max_batch_tokens);
  const WorkPlan plan = plan_work(num_bytes, options.num_threads, is_limited(options));
  UnitPlanner planner(tokenizer, texts, num_texts, options.encode, plan.unit_bytes, true);
  const Workspace::Lease workspace(plan.num_threads);
  const bool in_place = plan.num_threads == 1 && !options.wide_ids;
  // All in one round: what is needed is known before it is allocated.
  if (in_place || num_bytes > plan.num_threads * kUnitsPerRound * plan.unit_bytes) reserve(options, num_bytes, out);
  cut_batch(options,
            in_place ? encode_in_place(tokenizer, texts, options, planner, *workspace, out)
                     : encode_in_rounds(tokenizer, texts, options, plan.num_threads, planner, *workspace, out),
            out);
  for_each_output(options, out, [](auto& values, std::size_t) { values.shrink(); });
}

}  // namespace bert_fast::wordpiece
