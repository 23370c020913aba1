// Steps: calls of implementations. A list of them is a program over values.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "core/op_def.h"
#include "core/value.h"
#include "kernel_ops/framework/implementations.h"

namespace tandem {

/// What a step is. Passes decide by this; a user may choose any name.
enum class StepKind : uint8_t {
  /// a step of an op's definition.
  op,
  /// What a fusion put in the place of others.
  fused,
  // The planner's own, which no op asks for:
  cast,
  /// Where the user asked that numbers become those of the recipe's format: a quantize and a
  /// dequantize step from then on.
  round,
  /// The sum of two gradients.
  add,
  /// A parameter that is several tensors, and their gradients from its own.
  join,
  split,
  rename,
  seed,
  quantize,
  /// One that says what it does, and that nothing takes the place of.
  watched_quantize,
  dequantize,
  /// An output that stays in codes.
  hand_over,
  /// Of a slot of the recipe's state, which it brings up to date.
  take_scale,
  /// Into a slot of the recipe's state: it runs where the step that writes the amax does.
  record_amax,
  /// Brings the codes of a weight up to date in its workspace.
  refresh,
  /// A step of forward that backward runs again instead of having what it writes kept.
  again,
  /// What such a step reads, as a value that comes after the gradients that backward is given:
  /// compilers would take the step for that of forward otherwise, and keep its results.
  behind,
};

/// A part of an op: its nth step of a direction. Every part is covered exactly once.
struct Part {
  uint32_t op = 0;
  bool is_backward = false;
  uint16_t nth = 0;
  auto operator<=>(const Part&) const = default;
};

/// A list operand among the reads or writes of a step.
struct ListRange {
  uint32_t first = 0, count = 0;
};

/// What a step quantizes by itself, in groups that have scales of their own.
struct ByGroup {
  /// Null: it is read in codes, or as it is.
  const Quantizer* quantizer = nullptr;
  /// False: its amaxes alone are asked for, and the product takes the numbers.
  bool is_multiplied = true;
  /// Places among the step's reads and writes, npos where there is none: what the quantizer is
  /// given, a scale for each group or one seed; and the amax of each group.
  size_t given = npos, amaxes = npos;
};

/// What a fused step does to memory in the place of a member: ranges of its `mutates` and
/// `absorbs`.
struct Effect {
  ListRange mutates, absorbs;
};

/// The implementations that a step has taken, in any call: for `explain`. Any thread may add to it;
/// a copy is another step, which has taken none.
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

/// One call of an implementation.
struct Step {
  StepKind kind = StepKind::op;
  /// For people, and for patterns of ops: "rms_norm", "rms_norm.backward"; the fusion's name where
  /// fused.
  std::string name;
  /// Of an op's step: "activation", "activation.backward", or empty.
  std::string family;
  Run run = nullptr;
  Phase phase = Phase::compute;
  /// As the definition calls them, parallel to reads and writes.
  Names read_names, write_names;
  /// Value::none for an operand that is absent.
  Values reads;
  /// Value::none for a result that nobody demands.
  Values writes;
  /// Positions of what chains go through: x and y, in backward grad_y and grad_x; npos where the
  /// step has none.
  size_t main_read = 0, main_write = 0;
  std::vector<ListRange> read_lists, write_lists;
  /// Workspaces, buffers and in-place operands: such steps are never repeated, nor reordered among
  /// those of the same value.
  Values mutates;
  /// Of a step of backward: arguments of the plan whose gradients go into what it mutates. It runs
  /// where one of them is asked for.
  std::vector<uint32_t> absorbs;
  /// Of a fused step, by FusedRun::mutates. One does nothing where nobody asks for what it
  /// absorbs.
  std::vector<Effect> effects;
  std::vector<Part> covers;
  /// Of one that runs again: what it covers in forward.
  std::vector<Part> repeats;
  /// Of a round step: the op that wants its numbers rounded.
  size_t asked_by = npos;
  /// One for an op's step and for a quantize step. Of a fused step one per member, in pattern
  /// order, null for one that is absent or has none.
  std::vector<Options> options;
  /// Under a recipe, of an op's step that quantizes in groups: by its contracts. Of a fused step by
  /// FusedRun::quantizes.
  std::vector<ByGroup> quantizers;
  bool runs_user_code = false;
  /// Whether the op may broadcast x here: nobody in the plan sums a gradient of it.
  bool broadcasts_input = false;
  /// Values whose last reader this step is.
  Values dead;
  /// Written by whoever runs the step.
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
