// The ways in which backward can get what it reads of forward: kept, written again, or made by
// steps of forward that run again; and what each costs.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "planner/draft.h"
#include "planner/sizes.h"
#include "planner/value_set.h"

namespace tandem {

/// Backward without what it may write again, and who may.
struct BackwardBase {
  struct Writer {
    /// Place in the whole backward.
    size_t step = npos;
    /// By a step that does nothing else.
    bool is_apart = false;
    /// What it reads for that.
    Values reads;
  };
  /// The steps that run in any case, and their places in the whole backward.
  Steps steps;
  std::vector<size_t> places;
  std::map<Value, Writer> writers;
  /// Of `writers`, in the order in which backward decides.
  Values candidates;

  /// `never_again`: what is not written again whoever could.
  BackwardBase(const Steps& whole, const Draft& draft, const ValueSet& never_again);
};

/// A value of forward that backward may want, and the ways in which it may get it.
struct Item {
  Value value = Value::none;
  double bytes = 0;
  /// That forward writes, so that it can be kept.
  bool can_be_kept = false;
  /// The step of forward that may run again for it.
  size_t step = npos;
  /// Among BackwardBase::steps; the step apart that writes it again has none.
  size_t writer = npos;
  bool has_writer_apart = false;
  /// Items that the writer reads for it.
  std::vector<size_t> writer_reads;
  /// Steps of the base that read it.
  std::vector<size_t> readers;
  /// Taken without a choice: it takes no memory, or there is no other way.
  bool is_fixed = false;
};

/// A step of forward that may run again.
struct Rerun {
  /// Items.
  std::vector<size_t> reads, writes;
  /// What it costs whatever it writes.
  double cost = 0, bytes = 0, flops = 0;
  bool is_view = false;
};

enum class Way : uint8_t { unneeded, kept, written_again, written_apart, run_again };

struct Outcome {
  bool is_possible = false;
  double bytes = 0, cost = 0;
  /// By item.
  std::vector<Way> ways;
};

/// All ways to give backward what it reads, of a fused forward. Refers to its arguments.
class Ways {
 public:
  Ways(const BackwardBase& base, const Draft& draft, const PerRow& per_row, double flops_per_byte);

  const std::vector<Item>& items() const { return items_; }
  const Rerun& rerun(size_t step) const { return reruns_[step]; }
  /// Whether a step of backward reads it that runs in any case.
  bool is_needed(size_t item) const { return std::ranges::binary_search(needed_, item); }

  /// What comes of it where of the items that are a choice those with `keep` are kept. One thread
  /// at a time.
  Outcome outcome(const std::vector<bool>& keep) const;

 private:
  size_t item_for(Value value);
  bool can_run_again(const Step& step) const;
  void complete(size_t index);
  void add_rerun(size_t index, size_t step);
  void find_successors();
  bool spread(const std::vector<bool>& keep, const std::vector<bool>& never, Outcome& found) const;
  bool is_in_order(const Outcome& found, std::vector<bool>& never) const;
  bool waits_for_reader(size_t index, const Outcome& found) const;
  Outcome weighed(Outcome found) const;

  const BackwardBase& base_;
  const Draft& draft_;
  const PerRow& per_row_;
  double flops_per_byte_;
  std::vector<size_t> item_of_;  // by value
  std::vector<Item> items_;
  std::vector<Rerun> reruns_;  // by step of forward
  ValueSet is_overwritten_, is_of_backward_;
  std::vector<size_t> writer_;      // by value: the step of forward
  std::vector<size_t> needed_;      // items that steps of backward read
  std::vector<size_t> candidates_;  // items that may be written again, in the order of deciding
  std::vector<std::vector<size_t>> successors_, writes_again_;  // by base step
  std::vector<std::vector<size_t>> rerun_readers_;              // by item
  mutable std::vector<bool> is_run_, is_accepted_;
};

}  // namespace tandem
