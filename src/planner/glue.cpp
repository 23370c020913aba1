#include "planner/glue.h"

#include <ATen/ops/randint.h>

#include <limits>

#include "core/call.h"
#include "kernel_ops/elementwise.h"
#include "kernel_ops/quantize.h"
#include "kernel_ops/weights.h"

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

Options arguments_of(const QuantizePoint& point) {
  return std::make_shared<QuantizeArguments>(
      QuantizeArguments{name_of(point.format), point.amax_epsilon, point.use_power_2_scales});
}

void run_cast(Call& call) { call.out(0, call.in(0).to(call.out_type(0).dtype)); }

void run_add(Call& call) {
  call.write<kernel_ops::AddBias>(call.in(0), std::optional<at::Tensor>(), call.maybe(1));
}

void run_rename(Call& call) { call.out(0, call.in(0)); }

/// aten's draw, because compilers know it as random: they neither merge two draws nor draw again where they recompute.
void run_draw_seed(Call& call) {
  call.out(0, at::randint(std::numeric_limits<int64_t>::max(), {},
                          call.in(0).options().dtype(at::kLong)));
}

void run_quantize(Call& call) {
  const auto& arguments = call.options<QuantizeArguments>();
  call.write<kernel_ops::QuantizeCurrent>(call.in(0), arguments.format, arguments.amax_epsilon,
                                          arguments.use_power_2_scales);
}

void run_dequantize(Call& call) {
  const std::string_view format = name_of(call.format(0));
  call.write<kernel_ops::Dequantize>(call.in(0), call.in(0, 1), format, call.out_type(0).dtype);
}

template <bool kBackward>
void run_refresh_weight(Call& call) {
  enum Read { weight, codes, dequant_scale, amax, stamp };
  const auto& arguments = call.options<QuantizeArguments>();
  kernel_ops::refresh_weight(call.in(weight), call.in(codes), call.in(dequant_scale), call.in(amax),
                             call.in(stamp), arguments.format, arguments.amax_epsilon,
                             arguments.use_power_2_scales, kBackward);
  for (size_t part = 0; part < 3; ++part) call.out(0, call.in(codes + part), part);
}

}  // namespace

Step cast_step(Value x, Value y) {
  return step_of(StepKind::cast, "cast", run_cast, {"x"}, {x}, {"y"}, {y});
}

Step add_step(Value a, Value b, Value y) {
  return step_of(StepKind::add, "add", run_add, {"a", "b"}, {a, b}, {"y"}, {y});
}

Step rename_step(Value x, Value y) {
  return step_of(StepKind::rename, "rename", run_rename, {"x"}, {x}, {"y"}, {y});
}

Step round_step(Value x, Value y) {
  return step_of(StepKind::round, "round", nullptr, {"x"}, {x}, {"y"}, {y});
}

Step seed_step(Value x, Value seed) {
  return step_of(StepKind::seed, "draw_seed", run_draw_seed, {"x"}, {x}, {"seed"}, {seed});
}

Step quantize_step(Value x, Value codes, const QuantizePoint& point) {
  Step step = step_of(StepKind::quantize, "quantize", run_quantize, {"x"}, {x}, {"codes"}, {codes});
  step.options = {arguments_of(point)};
  return step;
}

Step dequantize_step(Value codes, Value y) {
  return step_of(StepKind::dequantize, "dequantize", run_dequantize, {"codes"}, {codes}, {"y"},
                 {y});
}

Step refresh_weight_step(Value weight, const Values& workspace, Value codes,
                         const QuantizePoint& point, bool backward) {
  Step step =
      step_of(StepKind::refresh, "refresh_weight",
              backward ? run_refresh_weight<true> : run_refresh_weight<false>,
              {"weight", "codes", "dequant_scale", "amax", "stamp"},
              {weight, workspace[0], workspace[1], workspace[2], workspace[3]}, {"y"}, {codes});
  step.mutates = workspace;
  step.options = {arguments_of(point)};
  return step;
}

}  // namespace tandem
