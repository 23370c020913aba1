#include "pipeline/replay.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "executor/executor.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "pipeline/compare.h"

namespace tandem {

namespace {

/// Sums and functions are computed in float32 if their results are rounded to less. They may be off
/// by so many units of float32 per op, and per square root of the longest dimension that is summed
/// over, because roundings have either sign.
constexpr double kUnitsPerOp = 8, kUnitsPerSum = 4;
/// The limit, however many ops a fused step replaces.
constexpr double kLargestTolerance = 0x1p-4;
/// The share of a dtype's unit that each op may be off. Two roundings of nearly equal numbers are
/// at most a whole unit apart. One rounding is at most half a unit from the exact number, and later
/// operations may increase that a little.
constexpr double kOfRoundings = 1, kOfNumber = 0.6;

bool is_same_step(const Step& a, const Step& b) {
  return a.run == b.run && a.kind == b.kind && a.reads == b.reads && a.covers == b.covers;
}

/// The unfused steps that a fused step replaces.
Steps members_of(const Step& fused, const Steps& unfused) {
  Steps members;
  const std::vector<Part>& covers = fused.kind == StepKind::again ? fused.repeats : fused.covers;
  for (const Step& step : unfused)
    if (!step.covers.empty() &&
        std::includes(covers.begin(), covers.end(), step.covers.begin(), step.covers.end()))
      members.push_back(step);
  return members;
}

/// How far results of `step` may be from the results of its members, relative to the largest
/// element involved: one rounding per op, each of `per_rounding` units.
double tolerance_of(const Step& step, const Steps& members, const Plan& plan, Frame& values,
                    double per_rounding = kOfRoundings) {
  double tolerance = 0, arithmetic = 0;
  int64_t longest = 1;
  const auto note = [&](const Step& member) {
    double unit = 0;
    for (const Values* list : {&member.writes, &member.reads})
      for (const Value value : *list) {
        if (!exists(value) || index_of(value) >= plan.types.size()) continue;
        const Type& type = plan.types[index_of(value)];
        if (tensors_per_value(type) == 0) continue;
        if (list == &member.writes) unit = std::max(unit, unit_of(type.dtype));
        const at::Tensor& tensor = values.tensor(value);
        if (!tensor.defined()) continue;
        for (const int64_t size : tensor.sizes()) longest = std::max(longest, size);
      }
    tolerance += per_rounding * unit;
    arithmetic = std::max(arithmetic, unit <= unit_of(at::kDouble) ? unit : unit_of(at::kFloat));
  };
  for (const Step& member : members) note(member);
  if (members.empty()) note(step);
  const double ops = static_cast<double>(std::max<size_t>(members.size(), 1));
  tolerance +=
      arithmetic * (kUnitsPerOp * ops + kUnitsPerSum * std::sqrt(static_cast<double>(longest)));
  return std::min(tolerance, kLargestTolerance);
}

bool contains(const Values& values, Value value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// Whether `tensor` has the rows of `result`, or one number per row.
bool has_rows_of(const at::Tensor& tensor, const at::Tensor& result) {
  const at::IntArrayRef sizes = result.sizes(), leading = sizes.slice(0, sizes.size() - 1);
  if (tensor.numel() == 0) return false;
  if (tensor.dim() == 1) return tensor.numel() == c10::multiply_integers(leading);
  return tensor.dim() == result.dim() && tensor.sizes().slice(0, leading.size()).equals(leading);
}

at::Tensor decoded(Frame& frame, Value codes) {
  const Type& type = frame.type(codes);
  std::optional<at::Tensor> amax;
  if (tensors_per_value(type) == kPartsOfCodes) amax = frame.tensor(codes, kPartsOfCodes - 1);
  return kernel_ops::dispatch<kernel_ops::Dequantize>(
      {.codes = frame.tensor(codes, 0),
       .dequant_scale = frame.tensor(codes, 1),
       .quantizer = *type.quantizer,
       .column = type.direction == Direction::column,
       .dtype = type.dtype,
       .amax = amax})[0];
}

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

void Replay::run(const Steps& steps, at::Generator& generator) {
  for (const Step& step : steps) {
    if (step.runs_user_code)
      generator_states_[step.covers.empty() ? Part{} : step.covers.front()] = state_of(generator);
    run_keeping(step);
  }
}

bool Replay::has(Value value) {
  if (!exists(value) || index_of(value) >= plan().types.size()) return false;
  const Format format = frame().type(value).format;
  return format == Format::shape || format == Format::opaque || frame().tensor(value).defined();
}

at::Tensor Replay::generator_state(const Part& part) const {
  const auto known = generator_states_.find(part);
  return known == generator_states_.end() ? at::Tensor() : known->second;
}

/// Copies a value from the reference. Private values of joint fusions exist here already.
bool StepCheck::provide(Value value, Replay& reference) {
  if (!reference.has(value)) return false;
  switch (const Format format = frame().type(value).format; format) {
    case Format::shape:
      frame().shape(value) = reference.frame().shape(value);
      break;
    case Format::opaque:
      frame().opaque(value) = reference.frame().opaque(value);
      break;
    default:
      if (const std::vector<at::Tensor>* parts = reference.frame().parts(value)) {
        frame().hold(value, *parts);
        break;
      }
      for (size_t part = 0; part < tensors_per_value(frame().type(value)); ++part)
        frame().tensor(value, part) = reference.frame().tensor(value, part);
      if (const c10::SymDimVector* sizes = reference.frame().noted_sizes(value))
        frame().note_sizes(value, *sizes);
  }
  return true;
}

std::string StepCheck::compare(const Step& step, size_t write, const Steps& members,
                               Replay& reference, bool& is_same) {
  const Value value = step.writes[write];
  const Format format = frame().type(value).format;
  if (!reference.has(value) || tensors_per_value(frame().type(value)) == 0) return "";
  Frame& expected = reference.frame();
  ++comparisons_;
  bool equal = true;
  for (size_t part = 0; part < tensors_per_value(frame().type(value)); ++part)
    equal &= difference(frame().whole(value, part), expected.whole(value, part), 0, 0).empty();
  if (equal) return "";
  is_same = false;
  const double tolerance = tolerance_of(step, members, reference.plan(), expected);
  if (format == Format::codes) {
    // A scale of few bits, or a power of two, may differ if the amax differs slightly. Then only
    // dequantized values are compared.
    const at::Tensor &scale = frame().tensor(value, 1), &wanted = expected.tensor(value, 1);
    const bool is_coarse =
        !scale.is_floating_point() || frame().type(value).quantizer->power_of_two;
    if (auto found = is_coarse ? "" : difference(scale, wanted, tolerance, 0); !found.empty())
      return "dequant_scale: " + found;
    // Codes of inputs that differ in the last bit are mostly equal.
    return difference_in_norm(decoded(frame(), value), decoded(expected, value),
                              unit_of(*frame().type(value).quantizer));
  }
  const at::Tensor scale = scale_of(step, value, members, reference);
  std::string found = difference(frame().tensor(value), expected.tensor(value), tolerance, scale);
  if (!found.empty() || !kernel_ops::is_narrow(frame().type(value).dtype)) return found;
  const at::Tensor exact = in_float32(value, members, reference);
  if (!exact.defined()) return "";
  // If members overflow on the way, the exact result is unknown.
  const at::Tensor is_known = at::isfinite(exact).logical_and(at::isfinite(expected.tensor(value)));
  const auto known = [&](const at::Tensor& tensor) {
    return at::where(is_known, tensor.to(at::kFloat), 0.0f);
  };
  return difference(known(frame().tensor(value)), known(exact),
                    tolerance_of(step, members, reference.plan(), expected, kOfNumber),
                    scale.clamp_min(smallest_normal_of(frame().type(value).dtype)));
}

/// Computes a result of the members on equal operands, with everything narrower widened to float32.
/// If a fused step's results differ, this separates a rounding of up to one unit from an error of
/// that size. Undefined if a member runs user code, mutates what it reads, or quantizes.
at::Tensor StepCheck::in_float32(Value value, const Steps& members, Replay& reference) {
  const Plan& plan = reference.plan();
  std::vector<Type> types = plan.types;
  for (Type& type : types)
    if (kernel_ops::is_narrow(type.dtype)) type.dtype = at::kFloat;
  Frame wide(Path::direct, types, plan.slot_of, plan.tensor_slots);
  wide.reserve_side_values(plan.opaques, plan.shapes);
  for (const Step& member : members) {
    if (member.runs_user_code || !member.mutates.empty()) return {};
    for (const Values* list : {&member.reads, &member.writes})
      for (const Value each : *list)
        if (const Format format = exists(each) ? types[index_of(each)].format : Format::plain;
            format != Format::plain && format != Format::shape)
          return {};
    for (const Value read : member.reads) {
      if (!exists(read)) continue;
      if (types[index_of(read)].format == Format::shape) {
        wide.shape(read) = reference.frame().shape(read);
      } else if (!wide.tensor(read).defined()) {
        const at::Tensor& tensor = reference.frame().whole(read);
        wide.tensor(read) =
            kernel_ops::is_narrow(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
      }
    }
    Step keeping = member;
    keeping.dead.clear();
    run_step(wide, keeping);
  }
  return wide.tensor(value);
}

/// The magnitudes to which the roundings of a result are relative. A row is rounded at its own size
/// and at the size of the members' intermediate values in that row. If terms cancel, roundings
/// exceed the result, at most in proportion to the row's operands: a row whose operands are a
/// hundredth of the largest ones has a hundredth of the whole tensor's scale. This holds if rows
/// are computed from rows; sums over rows and quantized values have the whole tensor's scale.
at::Tensor StepCheck::scale_of(const Step& step, Value value, const Steps& members,
                               Replay& reference) {
  const Plan& plan = reference.plan();
  const at::Tensor& result = reference.frame().tensor(value);
  Values between;
  for (const Step& member : members)
    for (const Value written : member.writes)
      if (exists(written) && !writes(step, written) && reference.has(written))
        between.push_back(written);
  double whole = largest_of(result);
  for (const Value rounded : between)
    if (frame().type(rounded).format == Format::plain &&
        reference.frame().tensor(rounded).numel() == result.numel())
      whole = std::max(whole, largest_of(reference.frame().whole(rounded)));
  const at::Tensor for_all = at::scalar_tensor(whole, at::kDouble);
  if (!result.is_floating_point() || result.dim() < 2 || result.numel() == 0) return for_all;
  if (const Origin origin = frame().type(value).origin;
      origin == Origin::gradient || origin == Origin::intermediate)
    for (const Value param : plan.params)
      if (reference.frame().tensor(param).sizes() == result.sizes()) return for_all;

  at::Tensor scale = largest_of_rows(result), share;
  const auto note = [&](Value operand, const at::Tensor& tensor, bool is_rounded) {
    if (frame().type(operand).format != Format::plain) return false;
    if (!tensor.defined() || !tensor.is_floating_point() || contains(plan.params, operand))
      return true;
    if (!has_rows_of(tensor, result)) return false;
    const at::Tensor rows = largest_of_rows(tensor.reshape({scale.numel(), -1})).view_as(scale);
    if (is_rounded && tensor.numel() == result.numel()) scale = at::maximum(scale, rows);
    if (const double largest = rows.max().item<double>(); largest > 0)
      share = share.defined() ? at::maximum(share, rows / largest) : rows / largest;
    return true;
  };
  for (const Value operand : step.reads)
    if (holds_tensor(operand) && !note(operand, frame().whole(operand), false)) return for_all;
  for (const Value rounded : between)
    if (holds_tensor(rounded) && !note(rounded, reference.frame().whole(rounded), true))
      return for_all;
  return share.defined() ? at::maximum(scale, share * whole) : for_all;
}

bool StepCheck::holds_tensor(Value value) {
  return exists(value) && index_of(value) < bounds_.size() &&
         tensors_per_value(frame().type(value)) != 0;
}

void StepCheck::carry_bounds(const Step& step, bool is_same, double tolerance) {
  Bound bound;
  for (const Value value : step.reads)
    if (exists(value)) {
      bound.relative = std::max(bound.relative, bounds_[index_of(value)].relative);
      bound.in_norm |= bounds_[index_of(value)].in_norm;
    }
  if (is_same && bound.relative == 0) return;
  bound.relative += tolerance;
  for (const Value value : step.writes) {
    if (!exists(value)) continue;
    Bound written = bound;
    if (const Type& type = frame().type(value); type.format == Format::codes) {
      written.relative = std::max(written.relative, unit_of(*type.quantizer));
      written.in_norm = true;
    }
    bounds_[index_of(value)] = written;
  }
}

WrongStep StepCheck::check(const Steps& steps, const Steps& unfused, Replay& reference,
                           at::Generator& generator) {
  for (const Step& step : steps) {
    const Steps members = members_of(step, unfused);
    const double tolerance = tolerance_of(step, members, reference.plan(), reference.frame());
    const bool is_unfused = std::any_of(unfused.begin(), unfused.end(), [&](const Step& other) {
      return is_same_step(step, other);
    });
    bool is_same = true;
    if (!is_unfused) {
      for (const Value value : step.reads)
        if (exists(value)) provide(value, reference);
      if (step.runs_user_code && !members.empty())
        if (const at::Tensor state = reference.generator_state(members.front().covers.front());
            state.defined()) {
          const std::lock_guard<std::mutex> lock(generator.mutex());
          generator.set_state(state);
        }
      run_keeping(step);
      for (size_t w = 0; w < step.writes.size(); ++w) {
        if (!exists(step.writes[w])) continue;
        if (auto found = compare(step, w, members, reference, is_same); !found.empty())
          return {step.name, frame().type(step.writes[w]).name + ": " + found, step};
      }
    }
    carry_bounds(step, is_same, tolerance);
  }
  return {};
}

}  // namespace tandem
