// Steps: invocations of implementations. A list of steps is a program over values.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "core/op_def.h"
#include "core/value.h"
#include "kernel_ops/framework/implementations.h"

namespace tandem {

/// The kind of a step. Passes decide by the kind, because users may choose any name.
enum class StepKind : uint8_t {
  /// A step of an op's definition.
  op,
  /// A step with which a fusion replaced others.
  fused,
  // The planner adds steps of all following kinds; no op requests them.
  cast,
  /// Rounds numbers to the recipe's format at the user's request. The planner replaces it by a
  /// quantize and a dequantize step.
  round,
  /// Adds two gradients.
  add,
  /// Joins the tensors of a parameter, counts the rows of each, and splits the parameter's gradient
  /// into theirs.
  join,
  count_rows,
  split,
  rename,
  seed,
  quantize,
  /// A quantize step that reports what it does. No pass replaces it.
  watched_quantize,
  dequantize,
  /// Returns an output in codes.
  hand_over,
  /// Reads a scale from a slot of the recipe's state. In a new region it updates the state first.
  take_scale,
  /// Records an amax in a slot of the recipe's state. It runs where the step runs that writes the
  /// amax.
  record_amax,
  /// Updates the codes of a weight in its workspace.
  refresh,
  /// A step of forward that backward runs to recompute values that are not kept.
  again,
  /// Makes an operand of a recomputed step depend on the gradients of backward; compilers would
  /// else merge the step with forward's, and keep its results.
  behind,
};

/// The nth step of an op in one direction. The steps of a plan cover every part exactly once.
struct Part {
  uint32_t op = 0;
  bool is_backward = false;
  uint16_t nth = 0;
  auto operator<=>(const Part&) const = default;
};

/// The range of a list operand in the reads or writes of a step.
struct ListRange {
  uint32_t first = 0, count = 0;
};

/// An operand that a step quantizes itself, in groups with scales of their own.
struct ByGroup {
  /// Null: the step reads codes, or does not quantize the operand.
  const Quantizer* quantizer = nullptr;
  /// False: the step only measures amaxes, and multiplies the numbers.
  bool is_multiplied = true;
  /// The read with the quantizer's argument, which is a scale for each group or one seed, and the
  /// write of the groups' amaxes; npos where there is none.
  size_t given = npos, amaxes = npos;
};

/// The mutations that a fused step performs for a member, as ranges of its `mutates` and `absorbs`.
struct Effect {
  ListRange mutates, absorbs;
};

/// The implementations that any call of a step has used, for `explain`. Any thread may add to them.
/// A copy belongs to another step, and is empty.
class Taken {
 public:
  Taken() = default;
  Taken(const Taken&) noexcept {}
  Taken& operator=(const Taken&) noexcept { return *this; }
  void add(kernel_ops::ImplementationNames names) {
    if ((all() & names) != names) names_.fetch_or(names, std::memory_order_relaxed);
  }
  kernel_ops::ImplementationNames all() const { return names_.load(std::memory_order_relaxed); }

 private:
  std::atomic<kernel_ops::ImplementationNames> names_{0};
};

/// One invocation of an implementation.
struct Step {
  StepKind kind = StepKind::op;
  /// The name that users and patterns see, such as "rms_norm" or "rms_norm.backward"; a fused step
  /// has the fusion's name.
  std::string name;
  /// For an op's step "activation" or "activation.backward", or empty.
  std::string family;
  Run run = nullptr;
  Phase phase = Phase::compute;
  /// The names of reads and writes in the op's definition.
  Names read_names, write_names;
  /// Value::none for an absent operand.
  Values reads;
  /// Value::none for a result that is not demanded.
  Values writes;
  /// Indices of the values that link a pattern: x and y, in backward grad_y and grad_x; npos where
  /// the step has none.
  size_t main_read = 0, main_write = 0;
  std::vector<ListRange> read_lists, write_lists;
  /// Workspaces, buffers and in-place operands. A step that mutates is never repeated, and never
  /// reordered among the steps that use the value.
  Values mutates;
  /// For a backward step, arguments of the plan whose gradients the step adds to the tensors that
  /// it mutates. The step runs where one of these gradients is requested.
  std::vector<uint32_t> absorbs;
  /// For a fused step, in the order of FusedRun::mutates. An effect happens only where a gradient
  /// that it absorbs is requested.
  std::vector<Effect> effects;
  std::vector<Part> covers;
  /// For a step that recomputes, the parts that it covers in forward.
  std::vector<Part> repeats;
  /// For a round step, the op that requests it.
  size_t asked_by = npos;
  /// One entry for a step of an op or a quantize step. A fused step has one for each member in
  /// pattern order, null where the member is absent or has no options.
  std::vector<Options> options;
  /// For an op's step that quantizes in groups, in the order of its contracts; for a fused step in
  /// the order of FusedRun::quantizes.
  std::vector<ByGroup> quantizers;
  bool runs_user_code = false;
  /// Whether the op may broadcast x: no step of the plan sums a gradient of x.
  bool broadcasts_input = false;
  /// Values that no later step reads.
  Values dead;
  /// The executor writes it.
  mutable Taken taken;
};
using Steps = std::vector<Step>;

inline bool reads(const Step& step, Value value) {
  for (const Value v : step.reads)
    if (v == value && exists(v)) return true;
  return false;
}
inline bool writes(const Step& step, Value value) {
  for (const Value v : step.writes)
    if (v == value && exists(v)) return true;
  return false;
}

}  // namespace tandem
