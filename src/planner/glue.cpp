#include "planner/glue.h"

#include <algorithm>

#include "kernel_ops/weights/weights.h"
#include "ops/glue.h"
#include "planner/draft.h"

namespace tandem {

namespace {

Step step_of(StepKind kind, std::string_view name, Run run, Names read_names, Values reads,
             Names write_names, Values writes) {
  Step step;
  step.kind = kind;
  step.name = name;
  step.run = run;
  step.read_names = std::move(read_names);
  step.reads = std::move(reads);
  step.write_names = std::move(write_names);
  step.writes = std::move(writes);
  return step;
}

/// No ownership is needed: quantizers are never destroyed.
Options as_options(const Quantizer& quantizer) { return {std::shared_ptr<void>(), &quantizer}; }

/// Makes a step run after these gradients are known.
void put_behind(Step& step, const Values& gradients) {
  step.read_names.insert(step.read_names.end(), gradients.size(), "gradient");
  step.reads.insert(step.reads.end(), gradients.begin(), gradients.end());
}

Step state_step(StepKind kind, std::string_view name, Run run, const StateSlot& slot,
                Values first) {
  Names read_names;
  if (!first.empty()) read_names.push_back("amax");
  for (const ScalingStateTensor& each : kScalingState) read_names.push_back(each.name);
  read_names.push_back("region");
  Values reads = std::move(first);
  reads.insert(reads.end(), slot.state.begin(), slot.state.end());
  reads.push_back(slot.region);
  Step step = step_of(kind, name, run, std::move(read_names), std::move(reads), {}, {});
  step.options = {std::make_shared<glue::SlotOptions>(glue::SlotOptions{slot.slots, slot.update})};
  return step;
}

}  // namespace

Step cast_step(Value x, Value y) {
  return step_of(StepKind::cast, "cast", glue::cast, {"x"}, {x}, {"y"}, {y});
}

Step add_step(Value a, Value b, Value y) {
  return step_of(StepKind::add, "add", glue::add, {"a", "b"}, {a, b}, {"y"}, {y});
}

Step join_step(const Values& parts, Value y) {
  return step_of(StepKind::join, "join", glue::join, Names(parts.size(), "part"), parts, {"y"},
                 {y});
}

Step join_codes_step(const Values& parts, Value y) {
  return step_of(StepKind::join, "join_codes", glue::join_codes, Names(parts.size(), "part"), parts,
                 {"y"}, {y});
}

Step count_rows_step(const Values& parts, Value rows) {
  return step_of(StepKind::count_rows, "count_rows", glue::count_rows, Names(parts.size(), "part"),
                 parts, {"rows"}, {rows});
}

Step split_step(Value gradient, Value rows, const Values& gradients) {
  return step_of(StepKind::split, "split", glue::split, {"grad_y", "rows"}, {gradient, rows},
                 Names(gradients.size(), "grad_part"), gradients);
}

Step rename_step(Value x, Value y) {
  return step_of(StepKind::rename, "rename", glue::rename, {"x"}, {x}, {"y"}, {y});
}

Step round_step(Value x, Value y, size_t op) {
  Step step = step_of(StepKind::round, "round", nullptr, {"x"}, {x}, {"y"}, {y});
  step.asked_by = op;
  return step;
}

Step seed_step(Value x, Value seed) {
  return step_of(StepKind::seed, "draw_seed", glue::draw_seed, {"x"}, {x}, {"seed"}, {seed});
}

Step quantize_step(Value x, Value given, const GroupValues& group, const Quantizer& quantizer) {
  Step step = step_of(StepKind::quantize, "quantize", glue::quantize, {"x", "given"}, {x, given},
                      {"row_codes", "column_codes", "amax"}, {group.begin(), group.end()});
  step.options = {as_options(quantizer)};
  return step;
}

Step watched_quantize_step(Value x, Value given, const GroupValues& group,
                           const Quantizer& quantizer, const Watch& watch) {
  Step step = quantize_step(x, given, group, quantizer);
  step.kind = StepKind::watched_quantize;
  step.run = glue::watched_quantize;
  step.options = {std::make_shared<glue::WatchOptions>(glue::WatchOptions{&quantizer, watch})};
  return step;
}

Step watched_groups_step(Value x, Value splits, Value given, Value y, const Quantizer& quantizer,
                         const Watch& watch) {
  Step step = step_of(StepKind::watched_quantize, "quantize_groups", glue::watched_groups,
                      {"x", "splits", "given"}, {x, splits, given}, {"y"}, {y});
  step.options = {std::make_shared<glue::WatchOptions>(glue::WatchOptions{&quantizer, watch})};
  return step;
}

Step take_scale_step(const StateSlot& slot, Value scale) {
  Step step = state_step(StepKind::take_scale, "take_scale", glue::take_scale, slot, {});
  step.write_names = {"scale"};
  step.writes = {scale};
  step.mutates = {slot.state.begin(), slot.state.end()};
  return step;
}

Step record_amax_step(const StateSlot& slot, Value amax, bool counts) {
  Step step = state_step(StepKind::record_amax, "record_amax",
                         counts ? glue::record_amax<true> : glue::record_amax<false>, slot, {amax});
  step.mutates = {slot.state[1], slot.state[2]};
  return step;
}

Step matrix_amaxes_step(Value x, Value amaxes) {
  return step_of(StepKind::quantize, "matrix_amaxes", glue::matrix_amaxes, {"x"}, {x}, {"amaxes"},
                 {amaxes});
}

Step again_step(const Step& forward, Values writes) {
  Step step = forward;
  step.kind = StepKind::again;
  step.repeats = std::exchange(step.covers, {});
  step.dead.clear();
  step.writes = std::move(writes);
  if (forward.kind == StepKind::refresh) step.run = glue::refresh_weight<true>;
  if (forward.kind == StepKind::watched_quantize) {  // forward has reported already
    step.run = forward.run == glue::watched_groups ? glue::rename : glue::quantize;
    step.options = {
        as_options(*static_cast<const glue::WatchOptions*>(forward.options[0].get())->quantizer)};
  }
  return step;
}

Step behind_step(Value x, const Values& gradients, Value y) {
  Step step = step_of(StepKind::behind, "behind", glue::behind, {"x"}, {x}, {"y"}, {y});
  put_behind(step, gradients);
  return step;
}

Step dequantize_step(Value codes, Value y) {
  return step_of(StepKind::dequantize, "dequantize", glue::dequantize, {"codes"}, {codes}, {"y"},
                 {y});
}

Value add_handed_over(Draft& draft, Value row, Value column, Value of) {
  const bool needs_grad = draft.needs_grad(of);
  const Value y = draft.add_result(draft.dtype(of), draft.name(of) + " in codes", needs_grad);
  if (!exists(row)) std::swap(row, column);
  const bool copies = std::ranges::any_of(draft.forward, [&](const Step& step) {
    return step.kind == StepKind::hand_over && step.reads[0] == row;
  });
  const Run run = needs_grad
                      ? (copies ? glue::hand_over<true, true> : glue::hand_over<true, false>)
                      : (copies ? glue::hand_over<false, true> : glue::hand_over<false, false>);
  draft.forward.push_back(step_of(StepKind::hand_over, "hand_over", run,
                                  {"row_codes", "column_codes"}, {row, column}, {"y"}, {y}));
  return y;
}

namespace {
Step step_of_weight(const char* name, Run run, const Values& weight, const Values& workspace,
                    const std::array<Value, 2>& codes, const Quantizer& quantizer) {
  Names read_names(weight.size(), "weight");
  read_names.insert(read_names.end(), std::begin(kernel_ops::kWorkspaceNames),
                    std::end(kernel_ops::kWorkspaceNames));
  Values reads = weight;
  reads.insert(reads.end(), workspace.begin(), workspace.end());
  Step step = step_of(StepKind::refresh, name, run, std::move(read_names), std::move(reads),
                      {"row_codes", "column_codes"}, {codes.begin(), codes.end()});
  step.options = {std::make_shared<glue::OfWeight>(glue::OfWeight{&quantizer, weight.size()})};
  return step;
}
}  // namespace

Step refresh_weight_step(const Values& weight, const Values& workspace,
                         const std::array<Value, 2>& codes, const Quantizer& quantizer,
                         bool backward) {
  Step step = step_of_weight("refresh_weight",
                             backward ? glue::refresh_weight<true> : glue::refresh_weight<false>,
                             weight, workspace, codes, quantizer);
  std::ranges::copy_if(workspace, std::back_inserter(step.mutates), exists);
  return step;
}

Step weight_codes_step(const Values& weight, const Values& workspace, Value gradient,
                       const std::array<Value, 2>& codes, const Quantizer& quantizer) {
  Step step =
      step_of_weight("weight_codes", glue::weight_codes, weight, workspace, codes, quantizer);
  put_behind(step, {gradient});
  return step;
}

Step weight_codes_again_step(const Step& forward, Values writes, const Values& gradients) {
  Step step = again_step(forward, std::move(writes));
  step.name = "weight_codes";
  step.run = glue::weight_codes;
  step.mutates.clear();
  put_behind(step, gradients);
  return step;
}

WeightOfStep weight_of_step(const Step& step) {
  const auto& [quantizer, pieces] = *static_cast<const glue::OfWeight*>(step.options[0].get());
  return {quantizer, std::span(step.reads).first(pieces)};
}

}  // namespace tandem
