#include "planner/budget.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <set>

#include "planner/glue.h"
#include "planner/keep.h"
#include "planner/liveness.h"
#include "planner/schedule.h"
#include "planner/sizes.h"
#include "planner/ways.h"

namespace tandem {

namespace {

/// Sums of bytes per row are compared with this slack.
constexpr double kSlack = 1e-6;

/// The operations that a device computes in the time in which it moves a byte, rounded: in float32
/// on a CPU, in 16 bits elsewhere.
struct Device {
  c10::DeviceType type;
  double flops_per_byte;
};
constexpr Device kDevices[] = {{at::kCPU, 16}, {at::kCUDA, 250}};
constexpr double kFlopsPerByteElsewhere = 100;

double flops_per_byte(c10::DeviceType type) {
  for (const Device& device : kDevices)
    if (device.type == type) return device.flops_per_byte;
  return kFlopsPerByteElsewhere;
}

/// Results of ops with `recompute`, and what the planner's steps make from these.
ValueSet recomputed_values(const Description& description, const Draft& draft) {
  ValueSet values(draft.types.size());
  for (size_t op = 0; op < description.ops.size(); ++op) {
    if (!description.ops[op].recompute) continue;
    const OpKind& kind = *description.ops[op].kind;
    for (size_t result = kind.first_result; result < kind.first_temporary; ++result)
      if (const Value value = draft.operands[op].value(result); exists(value)) values.add(value);
  }
  for (const Step& step : draft.forward) {
    const bool is_between = step.kind == StepKind::cast || step.kind == StepKind::rename ||
                            step.kind == StepKind::quantize ||
                            step.kind == StepKind::watched_quantize ||
                            step.kind == StepKind::dequantize;
    if (is_between && exists(step.reads[0]) && values(step.reads[0])) values.add(step.writes);
  }
  return values;
}

/// Finds the cheapest outcome within a limit.
class Search {
 public:
  /// `never_kept`: values that are not kept if there is another way.
  Search(const Ways& ways, const ValueSet& never_kept)
      : ways_(ways), keep_(ways.items().size()), place_(ways.items().size()) {
    for (size_t i = 0; i < ways.items().size(); ++i)
      if (!ways.items()[i].is_fixed && !never_kept(ways.items()[i].value)) free_.push_back(i);
    const auto bytes = [&](size_t i) { return ways.items()[i].bytes; };
    std::ranges::stable_sort(free_, [&](size_t a, size_t b) {
      const bool first = ways.is_needed(a), second = ways.is_needed(b);
      return first != second ? first : bytes(a) > bytes(b);
    });
    for (size_t place = 0; place < free_.size(); ++place) place_[free_[place]] = place;
  }

  /// The cheapest outcome with at most `limit` bytes; not possible if nothing fits.
  Outcome within(double limit) {
    limit_ = limit + kSlack;
    best_ = {};
    for (const size_t i : free_) keep_[i] = true;
    if (free_.size() > kMostFreeValues) {
      drop_greedily();
      add_greedily();
      return best_;
    }
    price();
    descend(0, 0, ways_.outcome(keep_));
    return best_;
  }

  /// The least bytes that can be kept.
  double least() {
    best_ = {};
    limit_ = std::numeric_limits<double>::infinity();
    least_ = limit_;
    for (const size_t i : free_) keep_[i] = false;
    if (free_.size() > kMostFreeValues) return ways_.outcome(keep_).bytes;
    descend_to_least(0, 0);
    return least_;
  }

 private:
  void consider(const Outcome& outcome) {
    if (!outcome.is_possible || outcome.bytes > limit_) return;
    const bool is_better = !best_.is_possible || outcome.cost < best_.cost ||
                           (outcome.cost == best_.cost && outcome.bytes < best_.bytes);
    if (is_better) best_ = outcome;
  }

  /// Computes a lower bound of the cost of not keeping each value, whatever else is not kept.
  void price() {
    const Outcome all = ways_.outcome(keep_);
    least_cost_.assign(ways_.items().size(), 0);
    for (const size_t i : free_) {
      if (!ways_.is_needed(i)) continue;
      keep_[i] = false;
      const Outcome without = ways_.outcome(keep_);
      keep_[i] = true;
      if (!without.is_possible || !all.is_possible) continue;
      const Item& item = ways_.items()[i];
      if (without.ways[i] != Way::run_again) {
        least_cost_[i] = item.bytes;
        continue;
      }
      const Rerun& rerun = ways_.rerun(item.step);
      const auto shares = std::ranges::count_if(
          rerun.writes, [&](size_t other) { return ways_.items()[other].bytes > 0; });
      least_cost_[i] = (rerun.is_view ? 0 : item.bytes) + (shares == 1 ? rerun.cost : 0);
    }
    by_price_ = free_;
    std::erase_if(by_price_, [&](size_t i) { return !ways_.is_needed(i); });
    std::ranges::stable_sort(by_price_, [&](size_t a, size_t b) {
      return least_cost_[a] * ways_.items()[b].bytes < least_cost_[b] * ways_.items()[a].bytes;
    });
  }

  /// A lower bound of the cost to get from `outcome` to the limit by values that are not decided
  /// yet.
  double still_to_pay(size_t decided, const Outcome& outcome) const {
    double excess = -limit_;
    for (size_t i = 0; i < ways_.items().size(); ++i)
      if (outcome.ways[i] == Way::kept && ways_.is_needed(i))
        excess += std::max(ways_.items()[i].bytes, 0.0);
    double cost = 0;
    for (const size_t i : by_price_) {
      if (excess <= 0) break;
      if (place_[i] < decided) continue;
      const double bytes = ways_.items()[i].bytes, share = std::min(1.0, excess / bytes);
      cost += share * least_cost_[i];
      excess -= bytes;
    }
    return cost;
  }

  /// `outcome`: the outcome in which every undecided value is kept, which costs least.
  void descend(size_t decided, double kept, const Outcome& outcome) {
    if (kept > limit_ || !outcome.is_possible) return;
    consider(outcome);
    if (outcome.bytes <= limit_ || decided == free_.size()) return;
    if (best_.is_possible && outcome.cost + still_to_pay(decided, outcome) >= best_.cost - kSlack)
      return;
    const size_t i = free_[decided];
    keep_[i] = false;
    descend(decided + 1, kept, ways_.outcome(keep_));
    keep_[i] = true;
    descend(decided + 1, kept + (ways_.is_needed(i) ? ways_.items()[i].bytes : 0), outcome);
  }

  void descend_to_least(size_t decided, double kept) {
    if (kept >= least_ || least_ == 0) return;
    const Outcome outcome = ways_.outcome(keep_);
    if (outcome.is_possible) least_ = std::min(least_, outcome.bytes);
    for (size_t next = decided; next < free_.size(); ++next) {
      const size_t i = free_[next];
      keep_[i] = true;
      descend_to_least(next + 1, kept + (ways_.is_needed(i) ? ways_.items()[i].bytes : 0));
      keep_[i] = false;
    }
  }

  /// Starts with everything kept, and drops the value with the least cost per saved byte first.
  void drop_greedily() {
    for (const size_t i : free_) keep_[i] = true;
    Outcome now = ways_.outcome(keep_);
    while (now.is_possible && now.bytes > limit_) {
      size_t chosen = npos;
      double best = std::numeric_limits<double>::infinity();
      Outcome after;
      for (const size_t i : free_) {
        if (!keep_[i] || now.ways[i] != Way::kept) continue;
        keep_[i] = false;
        Outcome without = ways_.outcome(keep_);
        keep_[i] = true;
        const double saved = now.bytes - without.bytes;
        if (!without.is_possible || saved <= kSlack) continue;
        const double price = (without.cost - now.cost) / saved;
        if (price >= best) continue;
        best = price;
        chosen = i;
        after = std::move(without);
      }
      if (chosen == npos) return;
      keep_[chosen] = false;
      now = std::move(after);
    }
    consider(now);
  }

  /// Starts with nothing kept, and adds the value that saves the most cost per byte first.
  void add_greedily() {
    for (const size_t i : free_) keep_[i] = false;
    Outcome now = ways_.outcome(keep_);
    while (now.is_possible && now.bytes <= limit_) {
      consider(now);
      size_t chosen = npos;
      double best = 0;
      Outcome after;
      for (const size_t i : free_) {
        if (keep_[i] || now.ways[i] == Way::unneeded) continue;
        keep_[i] = true;
        Outcome with = ways_.outcome(keep_);
        keep_[i] = false;
        if (!with.is_possible || with.bytes > limit_) continue;
        const double spared = (now.cost - with.cost) / std::max(with.bytes - now.bytes, kSlack);
        if (spared <= best) continue;
        best = spared;
        chosen = i;
        after = std::move(with);
      }
      if (chosen == npos) return;
      keep_[chosen] = true;
      now = std::move(after);
    }
  }

  const Ways& ways_;
  std::vector<bool> keep_;
  std::vector<size_t> place_, free_, by_price_;
  std::vector<double> least_cost_;
  double limit_ = 0, least_ = 0;
  Outcome best_;
};

/// Builds the backward of an outcome.
class Assembly {
 public:
  Assembly(const BackwardBase& base, const Ways& ways, const Outcome& outcome, Draft& draft)
      : base_(base), ways_(ways), outcome_(outcome), draft_(draft) {}

  /// Backward with the recomputed forward steps, each before the first reader of its results.
  /// `traced`: compilers must not recognize them as the steps of forward.
  Steps backward(const Steps& whole, bool traced) {
    const size_t count = draft_.forward.size();
    std::vector<size_t> place(count, npos);
    const auto& items = ways_.items();
    for (size_t s = count; s-- > 0;)
      for (const size_t item : ways_.rerun(s).writes) {
        if (outcome_.ways[item] != Way::run_again) continue;
        for (const size_t reader : items[item].readers)
          place[s] = std::min(place[s], base_.places[reader]);
        for (size_t later = s + 1; later < count; ++later)
          if (place[later] != npos && reads(draft_.forward[later], items[item].value))
            place[s] = std::min(place[s], place[later]);
      }
    Steps backward;
    for (size_t w = 0; w <= whole.size(); ++w) {
      for (size_t s = 0; s < count; ++s)
        if (place[s] != npos && place[s] == w) add(s, traced, backward);
      if (w < whole.size()) backward.push_back(whole[w]);
    }
    return backward;
  }

 private:
  bool is_made_in_backward(Value value) const {
    for (size_t i = 0; i < ways_.items().size(); ++i)
      if (ways_.items()[i].value == value)
        return outcome_.ways[i] != Way::kept && outcome_.ways[i] != Way::unneeded;
    return false;
  }

  void add(size_t forward, bool traced, Steps& backward) {
    const Step& step = draft_.forward[forward];
    Values writes(step.writes.size(), Value::none);
    for (const size_t item : ways_.rerun(forward).writes)
      if (outcome_.ways[item] == Way::run_again)
        for (size_t w = 0; w < writes.size(); ++w)
          if (step.writes[w] == ways_.items()[item].value) writes[w] = step.writes[w];
    if (traced && step.kind == StepKind::refresh) {  // a compiler would copy what backward mutates
      backward.push_back(weight_codes_again_step(step, std::move(writes), given_gradients()));
      return;
    }
    Step again = again_step(step, std::move(writes));
    if (traced &&
        std::ranges::none_of(again.reads, [&](Value v) { return is_made_in_backward(v); }))
      hide(again, backward);
    backward.push_back(std::move(again));
  }

  Values given_gradients() const {
    Values gradients;
    std::ranges::copy_if(draft_.output_gradients, std::back_inserter(gradients), exists);
    return gradients;
  }

  /// Puts one operand of a recomputed step behind a gradient, so that a compiler cannot reuse the
  /// result of forward. It takes the cheapest kind of operand to hide, an extra input last: a sum
  /// accepts a smaller operand only if it is an argument of the caller.
  void hide(Step& again, Steps& backward) {
    size_t least = npos;
    const auto weight = [&](Value value) {
      const Origin origin = draft_.types[index_of(value)].origin;
      if (origin == Origin::input) return value == draft_.inputs[0] ? 2 : 3;
      return origin == Origin::param ? 0 : origin == Origin::result ? 1 : 2;
    };
    for (size_t r = 0; r < again.reads.size(); ++r)
      if (exists(again.reads[r]) &&
          tensors_per_value(draft_.types[index_of(again.reads[r])]) != 0 &&
          (least == npos || weight(again.reads[r]) <= weight(again.reads[least])))
        least = r;
    if (least == npos) return;
    const Value hidden = again.reads[least];
    Type type = draft_.types[index_of(hidden)];
    type.origin = Origin::intermediate;
    type.view_of = Value::none;
    type.name += " again";
    const Value shown = draft_.add(std::move(type));
    backward.push_back(behind_step(hidden, given_gradients(), shown));
    std::ranges::replace(again.reads, hidden, shown);
  }

  const BackwardBase& base_;
  const Ways& ways_;
  const Outcome& outcome_;
  Draft& draft_;
};

KeptWithin explained(std::optional<double> budget, const Ways& ways, const Outcome& outcome,
                     const BackwardBase& base, const Steps& whole, const Draft& draft) {
  KeptWithin within{.budget = budget, .kept = outcome.bytes, .choices = {}};
  std::set<size_t> told;
  for (size_t i = 0; i < ways.items().size(); ++i) {
    const Item& item = ways.items()[i];
    if (outcome.ways[i] == Way::unneeded || item.bytes <= 0) continue;
    KeptChoice choice{.value = item.value, .bytes = item.bytes};
    if (outcome.ways[i] == Way::run_again) {
      const Rerun& rerun = ways.rerun(item.step);
      choice.kind = KeptChoice::run_again;
      choice.by = draft.forward[item.step].name;
      choice.added_bytes = rerun.is_view ? 0 : item.bytes;
      if (told.insert(item.step).second) {
        choice.added_bytes += rerun.bytes;
        choice.added_flops = rerun.flops;
      }
    } else if (outcome.ways[i] != Way::kept) {
      choice.kind = KeptChoice::written_again;
      choice.by = whole[base.writers.at(item.value).step].name;
      choice.added_bytes = item.bytes;
    }
    within.choices.push_back(std::move(choice));
  }
  return within;
}

}  // namespace

BudgetFit::BudgetFit(const Description& description, const PlanKey& key,
                     const std::vector<OpGroup>& backward_groups, const Draft& draft)
    : description_(description),
      key_(key),
      never_again_(kept_for_groups(description, backward_groups, draft)),
      recomputed_(recomputed_values(description, draft)),
      whole_(draft.backward) {
  const BackwardBase base(whole_, draft, never_again_);
  for (const Value value : values_from_forward(base.steps, draft.output_gradients))
    if (const Type& type = draft.types[index_of(value)];
        type.format == Format::codes && type.origin == Origin::result)
      codes_.push_back(value);
}

/// By item: whether the plan keeps it anyway, or nothing in backward could re-emit it.
std::vector<bool> BudgetFit::kept_without_budget(const Ways& ways, const BackwardBase& base,
                                                 const Plan& plan) const {
  std::vector<bool> keep;
  for (const Item& item : ways.items())
    keep.push_back(!recomputed_(item.value) &&
                   (std::ranges::find(plan.kept, item.value) != plan.kept.end() ||
                    !base.writers.contains(item.value)));
  return keep;
}

void BudgetFit::fit(Draft& draft, Plan& plan) {
  const std::optional<double> budget = description_.memory_budget;
  const PerRow per_row = measure(description_, key_, draft);
  const BackwardBase base(whole_, draft, never_again_);
  const Ways ways(base, draft, per_row, flops_per_byte(key_.tensor(0).device.type()));
  Search search(ways, recomputed_);
  const Outcome outcome =
      budget ? search.within(*budget) : ways.outcome(kept_without_budget(ways, base, plan));
  if (!outcome.is_possible) {
    const double least = std::ceil(search.least());
    TORCH_CHECK_VALUE(false, "memory_budget: expected at least ", least,
                      " bytes per row of the main input, the minimum of this pipeline, got ",
                      budget.value_or(0), ". Raise the budget, or split the pipeline.");
  }
  plan.within = explained(budget, ways, outcome, base, whole_, draft);
  ValueSet settled = never_again_;
  for (const Values* list : {&draft.inputs, &draft.params, &draft.argument_codes})
    settled.add(*list);
  for (size_t i = 0; i < ways.items().size(); ++i)
    if (outcome.ways[i] == Way::kept || outcome.ways[i] == Way::run_again)
      settled.add(ways.items()[i].value);
  draft.backward = Assembly(base, ways, outcome, draft).backward(whole_, key_.call().traced);
  std::vector<bool> flags = settled.flags();
  flags.resize(draft.types.size());
  choose_reemitted({}, draft.backward, draft.types, flags, draft.operands, {});
  settle_backward(draft, plan);
  double kept = 0;
  for (const Value value : plan.kept)
    if (index_of(value) < per_row.bytes.size() &&
        draft.types[index_of(value)].origin == Origin::result)
      kept += std::max(per_row.bytes[index_of(value)], 0.0);
  TORCH_INTERNAL_ASSERT(kept <= outcome.bytes + kSlack, "a plan within a budget was to keep ",
                        outcome.bytes, " bytes per row and keeps ", kept);
}

}  // namespace tandem
