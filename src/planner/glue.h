// Steps that lowering inserts between ops: casts, sums of gradients, seeds, quantize points, weight
// codes.
#pragma once

#include <array>
#include <span>

#include "core/step.h"
#include "kernel_ops/quantize/delayed.h"
#include "quantization/formats/format.h"
#include "tandem/export.h"

namespace tandem {

struct Draft;
struct Watch;

/// y = x in another dtype.
Step cast_step(Value x, Value y);
/// y = a + b: the gradient of a value with several readers. If one operand is undefined, y is the
/// other.
Step add_step(Value a, Value b, Value y);
/// y = the parts of a parameter, joined along the first dimension. No copy is made if they are
/// adjacent in memory.
Step join_step(const Values& parts, Value y);
/// y = the codes of one direction of the parts, joined.
Step join_codes_step(const Values& parts, Value y);
/// gradients = views of `gradient` for the parts of a joined value, Value::none for those not
/// needed. `parts` are read for their sizes only.
/// `rows`: the rows of each part, a shape.
Step count_rows_step(const Values& parts, Value rows);
Step split_step(Value gradient, Value rows, const Values& gradients);
/// y is x under another number, because their gradients differ.
Step rename_step(Value x, Value y);
/// y = x rounded to the recipe's format for `op`. The pass of quantize points replaces this step.
Step round_step(Value x, Value y, size_t op);
/// seed = one int64 from the generator of x's device.
Step seed_step(Value x, Value seed);
/// The writes of a quantize step: row codes, column codes, amax.
using GroupValues = std::array<Value, 3>;
/// group = codes and amax of x. `given`: a scale or a seed if the quantizer needs one.
Step quantize_step(Value x, Value given, const GroupValues& group, const Quantizer& quantizer);
/// A quantize_step that also records what quantizing loses (quantization/inspection.h).
Step watched_quantize_step(Value x, Value given, const GroupValues& group,
                           const Quantizer& quantizer, const Watch& watch);
/// y = x, and records what quantizing loses in each group that is not empty; the op quantizes the
/// groups itself. `splits`: rows of each group; Value::none if x holds one matrix per group.
/// `watch.group` is the number of groups.
Step watched_groups_step(Value x, Value splits, Value given, Value y, const Quantizer& quantizer,
                         const Watch& watch);
/// Slots of the recipe's state: values of the state's tensors (kernel_ops/quantize/delayed.h) and
/// of the region's number.
struct StateSlot {
  std::array<Value, kScalingState.size()> state;
  Value region;
  kernel_ops::SlotRange slots;
  const ScaleUpdate* update;
};
/// scale = the scale of the slot, or the scales of all slots.
Step take_scale_step(const StateSlot& slot, Value scale);
/// The amax of the slot becomes max(slot, amax). `counts`: an update is due at the end of the
/// region.
Step record_amax_step(const StateSlot& slot, Value amax, bool counts);
/// amaxes = the amax of each matrix of x [groups, ...].
Step matrix_amaxes_step(Value x, Value amaxes);
/// A forward step that backward runs a second time. `writes`: its results, Value::none for those
/// that backward does not need.
Step again_step(const Step& forward, Values writes);
/// y = x, ordered after these gradients, of which at least one must be defined.
Step behind_step(Value x, const Values& gradients, Value y);
/// y = the dequantized values of the codes.
Step dequantize_step(Value codes, Value y);

/// Adds a step at the end of forward: y = a tensor that holds these codes, or copies if an output
/// holds them already, as writes into one output must not change another; one direction may be
/// absent. The step returns dequantized values instead if the front has no type for codes, in
/// composite form, if autograd records, and if compiled code gets a gradient of y. The numbers of y
/// count as those of the value `of`.
Value add_handed_over(Draft& draft, Value row, Value column, Value of);
/// Row codes and column codes of the weight in its workspace (kernel_ops/weights/weights.h),
/// requantized if the weight has changed. `weight`: the parameter, or the parameters that it is
/// joined from.
Step refresh_weight_step(const Values& weight, const Values& workspace,
                         const std::array<Value, 2>& codes, const Quantizer& quantizer,
                         bool backward);
/// The codes of refresh_weight_step as new tensors, for backward: the workspace is not mutated. The
/// step runs after `gradient` is known.
Step weight_codes_step(const Values& weight, const Values& workspace, Value gradient,
                       const std::array<Value, 2>& codes, const Quantizer& quantizer);
/// A forward refresh step as weight_codes_step: writes its codes into new tensors in backward,
/// after these gradients, of which at least one must be defined. `writes`: Value::none for codes
/// that backward does not need.
Step weight_codes_again_step(const Step& forward, Values writes, const Values& gradients);
/// The weight behind a step of the three kinds above: its quantizer and its parameters.
struct WeightOfStep {
  const Quantizer* quantizer;
  std::span<const Value> pieces;
};
WeightOfStep weight_of_step(const Step& step);

}  // namespace tandem
