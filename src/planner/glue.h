// Steps that no op asks for and lowering puts between ops: casts, sums of gradients, seeds,
// quantize points, weight codes.
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
/// y = a + b: the gradient of a value with several readers. With one operand undefined it is a
/// rename.
Step add_step(Value a, Value b, Value y);
/// y = the parts of a parameter, one behind the other along the first dimension: no copy where they
/// lie so in memory.
Step join_step(const Values& parts, Value y);
/// y = the codes, of one direction, of such parts, in codes as well.
Step join_codes_step(const Values& parts, Value y);
/// The gradients of the parts (Value::none where not wanted) of a joined value, which is looked at
/// for the parts' sizes: views of `gradient`.
Step split_step(Value gradient, const Values& parts, const Values& gradients);
/// y is x under another number, where only their gradients differ.
Step rename_step(Value x, Value y);
/// y = x in the numbers of the recipe's format: a place that the pass of quantize points fills.
Step round_step(Value x, Value y, size_t op);
/// seed = one int64 from the generator of x's device.
Step seed_step(Value x, Value seed);
/// What a step that quantizes writes: row codes, column codes, amax.
using GroupValues = std::array<Value, 3>;
/// codes and amax of x; `given`, a scale or a seed, where the quantizer takes one.
Step quantize_step(Value x, Value given, const GroupValues& group, const Quantizer& quantizer);
/// The same, which keeps what it has done for take_watched (quantization/inspection.h).
Step watched_quantize_step(Value x, Value given, const GroupValues& group,
                           const Quantizer& quantizer, const Watch& watch);
/// y = x, whose groups the op multiplies by their own codes: tells what quantizing does to each
/// that is not empty. `splits`: rows of each group; Value::none where x is a matrix for each.
/// `watch.group`: how many there are.
Step watched_groups_step(Value x, Value splits, Value given, Value y, const Quantizer& quantizer,
                         const Watch& watch);
/// Slots of the recipe's state: values of its tensors (kernel_ops/quantize/delayed.h) and of the
/// region's number.
struct StateSlot {
  std::array<Value, kScalingState.size()> state;
  Value region;
  kernel_ops::SlotRange slots;
  const ScaleUpdate* update;
};
/// scale = that of the slot, or those of the slots.
Step take_scale_step(const StateSlot& slot, Value scale);
/// The slot's amax so far becomes the larger one. `counts`: an update is due behind the region.
Step record_amax_step(const StateSlot& slot, Value amax, bool counts);
/// amaxes = that of each matrix of x [groups, ...].
Step matrix_amaxes_step(Value x, Value amaxes);
/// A step of forward in backward, which writes of its results those that `writes` has in their
/// places.
Step again_step(const Step& forward, Values writes);
/// y = x behind any of these gradients, of which one at least is there.
Step behind_step(Value x, const Values& gradients, Value y);
/// y = decoded codes.
Step dequantize_step(Value codes, Value y);

/// Adds a step behind forward: y = a tensor that holds these codes, of which those of one direction
/// may be absent; decoded codes where no front has a type for such, in composite form, where
/// autograd records, and where a gradient of y comes to compiled code. y counts as the numbers
/// `of`.
Value add_handed_over(Draft& draft, Value row, Value column, Value of);
/// Row codes and column codes of the weight in its workspace (kernel_ops/weights/weights.h), made
/// again where the weight has changed. `weight`: the parameter, or those that it is joined of.
Step refresh_weight_step(const Values& weight, const Values& workspace,
                         const std::array<Value, 2>& codes, const Quantizer& quantizer,
                         bool backward);
/// The same codes for backward, as tensors of their own, behind `gradient`: nothing is mutated.
Step weight_codes_step(const Values& weight, const Values& workspace, Value gradient,
                       const std::array<Value, 2>& codes, const Quantizer& quantizer);
/// The same, of those that a refresh step of forward writes which `writes` has in their places,
/// behind any of these gradients, of which one at least is there.
Step weight_codes_again_step(const Step& forward, Values writes, const Values& gradients);
/// What such steps read codes of.
struct WeightOfStep {
  const Quantizer* quantizer;
  std::span<const Value> pieces;
};
WeightOfStep weight_of_step(const Step& step);

}  // namespace tandem
