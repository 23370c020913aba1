#include "planner/glue.h"

#include <ATen/ops/randint.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "core/call.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/grouped/grouped.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/weights/weights.h"
#include "planner/draft.h"
#include "quantization/inspection.h"

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

/// Quantizers are there for good.
Options as_options(const Quantizer& quantizer) { return {std::shared_ptr<void>(), &quantizer}; }

void run_cast(Call& call) { call.out(0, call.in(0).to(call.out_type(0).dtype)); }

void run_add(Call& call) {
  call.write<kernel_ops::AddBias>(call.in(0), std::optional<at::Tensor>(), call.maybe(1));
}

void run_join(Call& call) {
  c10::SmallVector<at::Tensor, 4> parts;
  for (size_t i = 0; i < call.step().reads.size(); ++i) parts.push_back(call.in(i));
  call.out(0, kernel_ops::joined(parts, /*may_view=*/call.path() == Path::direct));
}

void run_join_codes(Call& call) {
  c10::SmallVector<at::Tensor, 4> codes, scales;
  for (size_t i = 0; i < call.step().reads.size(); ++i) {
    codes.push_back(call.in(i));
    scales.push_back(call.in(i, 1));
  }
  const bool may_view = call.path() == Path::direct;
  const Type& type = call.out_type(0);
  call.out(0, kernel_ops::joined(codes, may_view));
  call.out(0, kernel_ops::joined_scales(scales, codes, *type.quantizer, type.direction, may_view),
           1);
}

void run_split(Call& call) {
  enum Read { gradient, first_part };
  c10::SymInt begin = 0;
  for (size_t i = 0; i < call.step().writes.size(); ++i) {
    const c10::SymInt length = call.in(first_part + i).sym_size(0);
    if (call.wants(i)) call.out(i, call.in(gradient).narrow_symint(0, begin, length));
    begin += length;
  }
}

void run_rename(Call& call) { call.out(0, call.in(0)); }

/// aten's draw, because compilers know it as random: they neither merge two draws nor draw again
/// where they recompute.
void run_draw_seed(Call& call) {
  call.out(0, at::randint(std::numeric_limits<int64_t>::max(), {},
                          call.in(0).options().dtype(at::kLong)));
}

void run_quantize(Call& call) {
  enum Read { x, given };
  call.write_codes<kernel_ops::Quantize>([&] { return kernel_ops::sizes_of(call.in(x)); },
                                         call.in(x), call.maybe(given), call.options<Quantizer>(),
                                         call.output_mask<3>());
}

struct WatchOptions {
  const Quantizer* quantizer;
  Watch watch;
};

std::string_view name_of(Role role) {
  switch (role) {
    case Role::input:
      return "input";
    case Role::weight:
      return "weight";
    case Role::grad_output:
      return "grad_output";
  }
  return "";
}

void tell(const WatchOptions& options, int64_t group, const at::Tensor& x, const Codes& codes) {
  const Watch& watch = options.watch;
  keep_watched({watch.pipeline, watch.op, std::string(name_of(watch.role)), group,
                kernel_ops::last_region(), options.quantizer->text,
                statistics_of(x, codes, *options.quantizer)});
}

void run_watched_quantize(Call& call) {
  enum Read { x, given };
  enum Write { rows, columns };
  const auto& options = call.options<WatchOptions>();
  const Quantizer& quantizer = *options.quantizer;
  call.write_codes<kernel_ops::Quantize>([&] { return kernel_ops::sizes_of(call.in(x)); },
                                         call.in(x), call.maybe(given), quantizer,
                                         call.output_mask<3>());
  if (call.in(x).is_meta()) return;  // it has no numbers
  // Codes of columns may be those of rotated numbers.
  if (!call.wants(rows) && (quantizer.hadamard || !call.wants(columns))) return;
  const size_t write = call.wants(rows) ? rows : columns;
  const at::TensorList parts = call.frame().tensors(call.step().writes[write]);
  const Codes codes{parts[0], parts[1], parts.size() > 2 ? std::optional(parts[2]) : std::nullopt,
                    write == rows ? Direction::row : Direction::column};
  tell(options, options.watch.group, call.in(x), codes);
}

void run_watched_groups(Call& call) {
  enum Read { x, splits, given };
  const at::Tensor& numbers = call.in(x);
  call.out(0, numbers);
  if (numbers.is_meta()) return;
  const auto& options = call.options<WatchOptions>();
  const kernel_ops::GroupQuantizer how{options.quantizer, call.maybe(given)};
  const int64_t groups = options.watch.group;
  const bool is_of_rows = call.has(splits);
  const at::Tensor rows =
      is_of_rows ? numbers.reshape({kernel_ops::rows_of(numbers).guard_int(__FILE__, __LINE__),
                                    numbers.size(-1)})
                 : numbers;
  const auto offsets = is_of_rows ? kernel_ops::group_offsets(call.in(splits), groups, rows.size(0))
                                  : std::vector<int64_t>();
  for (int64_t group = 0; group < groups; ++group) {
    const auto g = static_cast<size_t>(group);
    const at::Tensor part = is_of_rows ? kernel_ops::rows_between(rows, offsets[g], offsets[g + 1])
                                       : rows.select(0, group);
    if (part.numel() == 0) continue;
    const kernel_ops::CodedMatrix made = kernel_ops::codes_of_group(part, how, g);
    tell(options, group, part,
         {made.matrix, made.scale, made.amax.defined() ? std::optional(made.amax) : std::nullopt,
          made.direction});
  }
}

void run_dequantize(Call& call) {
  const Type& type = call.type(0);
  const auto sizes = call.sizes_of_numbers(0);
  call.write<kernel_ops::Dequantize>(call.in(0), call.in(0, 1), *type.quantizer,
                                     type.direction == Direction::column, call.out_type(0).dtype,
                                     call.amax_of_codes(0), at::OptionalSymIntArrayRef(sizes));
}

void run_matrix_amaxes(Call& call) { call.out(0, kernel_ops::matrix_amaxes(call.in(0))); }

struct SlotOptions {
  kernel_ops::SlotRange slots;
  const ScaleUpdate* update;
};

/// Reads from `first` on: the tensors of a state, then the region's number.
ScalingState state_at(Call& call, size_t first) {
  return scaling_state([&](size_t read) { return call.in(read); }, first);
}

void run_take_scale(Call& call) {
  const auto& options = call.options<SlotOptions>();
  call.out(0, kernel_ops::take_scale(state_at(call, 0), call.in(kScalingState.size()),
                                     options.slots, *options.update));
}

template <bool kCounts>
void run_record_amax(Call& call) {
  kernel_ops::record_amax(state_at(call, 1), call.in(0), call.in(1 + kScalingState.size()),
                          call.options<SlotOptions>().slots, kCounts);
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
  step.options = {std::make_shared<SlotOptions>(SlotOptions{slot.slots, slot.update})};
  return step;
}

/// Only who traces could take what follows for what forward has done.
void run_behind(Call& call) {
  size_t gradient = 1;
  while (!call.has(gradient)) ++gradient;
  const size_t parts = tensors_per_value(call.type(0));
  for (size_t part = 0; part < parts; ++part)
    call.out(0,
             call.path() == Path::dispatch
                 ? kernel_ops::dispatch<kernel_ops::Behind>(call.in(0, part), call.in(gradient))[0]
                 : call.in(0, part),
             part);
  call.note_sizes(call.step().writes[0], call.type(0), [&] { return call.sizes_of_numbers(0); });
}

/// Of the steps below, which read the pieces of the weight, its workspace, and the gradients that
/// they stand behind.
struct OfWeight {
  const Quantizer* quantizer;
  size_t pieces;
};

c10::SmallVector<at::Tensor, 4> weight_of(const Call& call) {
  c10::SmallVector<at::Tensor, 4> pieces;
  for (size_t i = 0; i < call.options<OfWeight>().pieces; ++i) pieces.push_back(call.in(i));
  return pieces;
}

kernel_ops::Workspace workspace_of(const Call& call) {
  kernel_ops::Workspace workspace;
  for (size_t part = 0; part < workspace.size(); ++part)
    if (const size_t read = call.options<OfWeight>().pieces + part; call.has(read))
      workspace[part] = call.in(read);
  return workspace;
}

template <typename Parts>
void give_codes(Call& call, const Parts& parts) {
  for (const Direction direction : {Direction::row, Direction::column})
    if (const auto write = static_cast<size_t>(direction); call.wants(write)) {
      const Type& type = call.out_type(write);
      for (size_t part = 0; part < tensors_per_value(type); ++part)
        call.out(write, parts[part_of(direction, part)], part);
      call.note_sizes(call.step().writes[write], type, [&] {
        return kernel_ops::sizes_of(kernel_ops::like_joined(weight_of(call)));
      });
    }
}

template <bool kBackward>
void run_refresh_weight(Call& call) {
  const kernel_ops::Workspace workspace = workspace_of(call);
  call.took(kernel_ops::kDispatcher);
  kernel_ops::refresh_weight(weight_of(call), workspace, *call.options<OfWeight>().quantizer,
                             kBackward);
  give_codes(call, workspace);
}

void run_weight_codes(Call& call) {
  call.took(kernel_ops::kDispatcher);
  const auto& [quantizer, pieces] = call.options<OfWeight>();
  size_t gradient = pieces + kernel_ops::workspace_size;
  while (!call.has(gradient)) ++gradient;
  give_codes(call, kernel_ops::weight_codes(weight_of(call), workspace_of(call), call.in(gradient),
                                            *quantizer, {call.wants(0), call.wants(1)}));
}

}  // namespace

Step cast_step(Value x, Value y) {
  return step_of(StepKind::cast, "cast", run_cast, {"x"}, {x}, {"y"}, {y});
}

Step add_step(Value a, Value b, Value y) {
  return step_of(StepKind::add, "add", run_add, {"a", "b"}, {a, b}, {"y"}, {y});
}

Step join_step(const Values& parts, Value y) {
  return step_of(StepKind::join, "join", run_join, Names(parts.size(), "part"), parts, {"y"}, {y});
}

Step join_codes_step(const Values& parts, Value y) {
  return step_of(StepKind::join, "join_codes", run_join_codes, Names(parts.size(), "part"), parts,
                 {"y"}, {y});
}

Step split_step(Value gradient, const Values& parts, const Values& gradients) {
  Names read_names(1 + parts.size(), "part");
  read_names[0] = "grad_y";
  Values reads{gradient};
  reads.insert(reads.end(), parts.begin(), parts.end());
  return step_of(StepKind::split, "split", run_split, std::move(read_names), std::move(reads),
                 Names(parts.size(), "grad_part"), gradients);
}

Step rename_step(Value x, Value y) {
  return step_of(StepKind::rename, "rename", run_rename, {"x"}, {x}, {"y"}, {y});
}

Step round_step(Value x, Value y, size_t op) {
  Step step = step_of(StepKind::round, "round", nullptr, {"x"}, {x}, {"y"}, {y});
  step.asked_by = op;
  return step;
}

Step seed_step(Value x, Value seed) {
  return step_of(StepKind::seed, "draw_seed", run_draw_seed, {"x"}, {x}, {"seed"}, {seed});
}

Step quantize_step(Value x, Value given, const GroupValues& group, const Quantizer& quantizer) {
  Step step = step_of(StepKind::quantize, "quantize", run_quantize, {"x", "given"}, {x, given},
                      {"row_codes", "column_codes", "amax"}, {group.begin(), group.end()});
  step.options = {as_options(quantizer)};
  return step;
}

Step watched_quantize_step(Value x, Value given, const GroupValues& group,
                           const Quantizer& quantizer, const Watch& watch) {
  Step step = quantize_step(x, given, group, quantizer);
  step.kind = StepKind::watched_quantize;
  step.run = run_watched_quantize;
  step.options = {std::make_shared<WatchOptions>(WatchOptions{&quantizer, watch})};
  return step;
}

Step watched_groups_step(Value x, Value splits, Value given, Value y, const Quantizer& quantizer,
                         const Watch& watch) {
  Step step = step_of(StepKind::watched_quantize, "quantize_groups", run_watched_groups,
                      {"x", "splits", "given"}, {x, splits, given}, {"y"}, {y});
  step.options = {std::make_shared<WatchOptions>(WatchOptions{&quantizer, watch})};
  return step;
}

Step take_scale_step(const StateSlot& slot, Value scale) {
  Step step = state_step(StepKind::take_scale, "take_scale", run_take_scale, slot, {});
  step.write_names = {"scale"};
  step.writes = {scale};
  step.mutates = {slot.state.begin(), slot.state.end()};
  return step;
}

Step record_amax_step(const StateSlot& slot, Value amax, bool counts) {
  Step step = state_step(StepKind::record_amax, "record_amax",
                         counts ? run_record_amax<true> : run_record_amax<false>, slot, {amax});
  step.mutates = {slot.state[1], slot.state[2]};
  return step;
}

Step matrix_amaxes_step(Value x, Value amaxes) {
  return step_of(StepKind::quantize, "matrix_amaxes", run_matrix_amaxes, {"x"}, {x}, {"amaxes"},
                 {amaxes});
}

Step again_step(const Step& forward, Values writes) {
  Step step = forward;
  step.kind = StepKind::again;
  step.repeats = std::exchange(step.covers, {});
  step.dead.clear();
  step.writes = std::move(writes);
  if (forward.kind == StepKind::refresh) step.run = run_refresh_weight<true>;
  if (forward.kind == StepKind::watched_quantize) {  // it has told already
    step.run = forward.run == run_watched_groups ? run_rename : run_quantize;
    step.options = {
        as_options(*static_cast<const WatchOptions*>(forward.options[0].get())->quantizer)};
  }
  return step;
}

Step behind_step(Value x, const Values& gradients, Value y) {
  Step step = step_of(StepKind::behind, "behind", run_behind, {"x"}, {x}, {"y"}, {y});
  step.read_names.insert(step.read_names.end(), gradients.size(), "gradient");
  step.reads.insert(step.reads.end(), gradients.begin(), gradients.end());
  return step;
}

Step dequantize_step(Value codes, Value y) {
  return step_of(StepKind::dequantize, "dequantize", run_dequantize, {"codes"}, {codes}, {"y"},
                 {y});
}

namespace {

std::atomic<QuantizedWriter> quantized_writer{nullptr};

/// AOTAutograd takes the gradient of an output for a tensor of the output's type, which that of
/// codes is not.
bool is_compiled(Call& call) { return call.in(0).key_set().has(c10::DispatchKey::Python); }

template <bool kNeedsGrad>
void run_hand_over(Call& call) {
  const QuantizedWriter write = quantized_writer.load(std::memory_order_relaxed);
  if (write == nullptr || call.path() == Path::composite || (kNeedsGrad && is_compiled(call)))
    return run_dequantize(call);
  const Type& type = call.type(0);
  TensorInCodes codes{.quantizer = type.quantizer,
                      .dtype = call.out_type(0).dtype,
                      .sizes = call.sizes_of_numbers(0)};
  for (size_t read = 0; read < 2; ++read)
    for (size_t part = 0; call.has(read) && part < tensors_per_value(type); ++part) {
      const at::Tensor& tensor = call.in(read, part);
      codes.parts[part_of(call.type(read).direction, part)] =
          type.origin == Origin::result ? tensor : tensor.clone();  // outputs alias no argument
    }
  call.out(0, write(codes));
}

}  // namespace

void set_quantized_writer(QuantizedWriter writer) { quantized_writer = writer; }

Value add_handed_over(Draft& draft, Value row, Value column, Value of) {
  const bool needs_grad = draft.needs_grad(of);
  const Value y = draft.add(
      {draft.dtype(of), Format::plain, Origin::result, Value::none, draft.name(of) + " in codes"});
  draft.requires_grad[index_of(y)] = needs_grad;
  if (!exists(row)) std::swap(row, column);
  draft.forward.push_back(step_of(StepKind::hand_over, "hand_over",
                                  needs_grad ? run_hand_over<true> : run_hand_over<false>,
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
  step.options = {std::make_shared<OfWeight>(OfWeight{&quantizer, weight.size()})};
  return step;
}

/// `step` of a weight, run behind any of these gradients.
void put_behind(Step& step, const Values& gradients) {
  step.read_names.insert(step.read_names.end(), gradients.size(), "gradient");
  step.reads.insert(step.reads.end(), gradients.begin(), gradients.end());
}
}  // namespace

Step refresh_weight_step(const Values& weight, const Values& workspace,
                         const std::array<Value, 2>& codes, const Quantizer& quantizer,
                         bool backward) {
  Step step = step_of_weight("refresh_weight",
                             backward ? run_refresh_weight<true> : run_refresh_weight<false>,
                             weight, workspace, codes, quantizer);
  std::ranges::copy_if(workspace, std::back_inserter(step.mutates), exists);
  return step;
}

Step weight_codes_step(const Values& weight, const Values& workspace, Value gradient,
                       const std::array<Value, 2>& codes, const Quantizer& quantizer) {
  Step step = step_of_weight("weight_codes", run_weight_codes, weight, workspace, codes, quantizer);
  put_behind(step, {gradient});
  return step;
}

Step weight_codes_again_step(const Step& forward, Values writes, const Values& gradients) {
  Step step = again_step(forward, std::move(writes));
  step.name = "weight_codes";
  step.run = run_weight_codes;
  step.mutates.clear();
  put_behind(step, gradients);
  return step;
}

WeightOfStep weight_of_step(const Step& step) {
  const auto& [quantizer, pieces] = *static_cast<const OfWeight*>(step.options[0].get());
  return {quantizer, std::span(step.reads).first(pieces)};
}

}  // namespace tandem
