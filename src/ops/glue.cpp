#include "ops/glue.h"

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
#include "quantization/inspection.h"

namespace tandem::glue {

// Contiguous whatever the layout of x, because backward may run the cast again on a copy of x: a
// product's bits depend on the layout of its operands.
void cast(Call& call) {
  call.out(0, call.in(0).to(call.out_type(0).dtype, /*non_blocking=*/false, /*copy=*/false,
                            at::MemoryFormat::Contiguous));
}

void add(Call& call) { call.write<kernel_ops::AddBias>({.x = call.in(0), .extra = call.maybe(1)}); }

void join(Call& call) {
  c10::SmallVector<at::Tensor, 4> parts;
  for (size_t i = 0; i < call.step().reads.size(); ++i) parts.push_back(call.in(i));
  if (call.path() == Path::direct && kernel_ops::are_multiplied_apart(parts))
    return call.frame().hold(call.step().writes[0], parts);
  call.out(0, kernel_ops::joined(parts, /*may_view=*/call.path() == Path::direct));
}

void join_codes(Call& call) {
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

void count_rows(Call& call) {
  c10::SymDimVector rows;
  for (size_t i = 0; i < call.step().reads.size(); ++i) rows.push_back(call.in(i).sym_size(0));
  call.frame().shape(call.step().writes[0]) = std::move(rows);
}

void split(Call& call) {
  enum Read { gradient, rows };
  c10::SymInt begin = 0;
  for (size_t i = 0; i < call.step().writes.size(); ++i) {
    const c10::SymInt length = call.frame().shape(call.step().reads[rows])[i];
    if (call.wants(i)) call.out(i, call.in(gradient).narrow_symint(0, begin, length));
    begin += length;
  }
}

void rename(Call& call) { call.out(0, call.in(0)); }

/// The draw is an ATen operation because compilers know that it is random: they neither merge two
/// draws nor repeat a draw in a recomputation.
void draw_seed(Call& call) {
  call.out(0, at::randint(std::numeric_limits<int64_t>::max(), {},
                          call.in(0).options().dtype(at::kLong)));
}

namespace {
void quantize_by(Call& call, const Quantizer& quantizer) {
  enum Read { x, given };
  Group group = call.run<kernel_ops::Quantize>({.x = call.in(x),
                                                .given = call.maybe(given),
                                                .quantizer = quantizer,
                                                .output_mask = call.output_mask<3>()});
  call.hand_out_group(
      0, [&] { return kernel_ops::sizes_of(call.in(x)); }, group.data());
}
}  // namespace

void quantize(Call& call) { quantize_by(call, call.options<Quantizer>()); }

namespace {
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

void tell(const WatchOptions& options, int64_t group, const at::Tensor& x,
          const CodedMatrix& codes) {
  const Watch& watch = options.watch;
  keep_watched({watch.pipeline, watch.op, std::string(name_of(watch.role)), group,
                kernel_ops::last_region(), options.quantizer->text, statistics_of(x, codes)});
}
}  // namespace

void watched_quantize(Call& call) {
  enum Read { x };
  enum Write { rows, columns };
  const auto& options = call.options<WatchOptions>();
  const Quantizer& quantizer = *options.quantizer;
  quantize_by(call, quantizer);
  if (call.in(x).is_meta()) return;  // a meta tensor has no numbers
  // Rotated column codes do not show the error of the numbers.
  if (!call.wants(rows) && (quantizer.hadamard || !call.wants(columns))) return;
  const size_t write = call.wants(rows) ? rows : columns;
  tell(options, options.watch.group, call.in(x), call.frame().operand(call.step().writes[write]));
}

void watched_groups(Call& call) {
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
    const Codes made = kernel_ops::codes_of_group(part, how, g);
    tell(options, group, part, made.in(Direction::row));
  }
}

void dequantize(Call& call) {
  const auto sizes = call.sizes_of_numbers(0);
  call.write<kernel_ops::Dequantize>(kernel_ops::dequantizing(
      call.operand(0), call.out_type(0).dtype, c10::SymIntArrayRef(sizes)));
}

void matrix_amaxes(Call& call) { call.out(0, kernel_ops::matrix_amaxes(call.in(0))); }

namespace {
/// Reads a state: its tensors, from read `first` on, and then the region's number.
ScalingState state_at(Call& call, size_t first) {
  return scaling_state([&](size_t read) { return call.in(read); }, first);
}
}  // namespace

void take_scale(Call& call) {
  const auto& options = call.options<SlotOptions>();
  call.out(0, kernel_ops::take_scale(state_at(call, 0), call.in(kScalingState.size()),
                                     options.slots, *options.update));
}

template <bool kCounts>
void record_amax(Call& call) {
  kernel_ops::record_amax(state_at(call, 1), call.in(0), call.in(1 + kScalingState.size()),
                          call.options<SlotOptions>().slots, kCounts);
}
template void record_amax<true>(Call&);
template void record_amax<false>(Call&);

/// Only tracers and compilers could merge the following step with a step of forward.
void behind(Call& call) {
  size_t gradient = 1;
  while (!call.has(gradient)) ++gradient;
  const size_t parts = tensors_per_value(call.type(0));
  for (size_t part = 0; part < parts; ++part)
    call.out(0,
             call.path() == Path::dispatch
                 ? kernel_ops::dispatch<kernel_ops::Behind>(
                       {.x = call.in(0, part), .gradient = call.in(gradient)})[0]
                 : call.in(0, part),
             part);
  call.note_sizes(call.step().writes[0], call.type(0), [&] { return call.sizes_of_numbers(0); });
}

namespace {
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
}  // namespace

template <bool kBackward>
void refresh_weight(Call& call) {
  const kernel_ops::Workspace workspace = workspace_of(call);
  call.took(kernel_ops::kDispatcher);
  kernel_ops::refresh_weight(weight_of(call), workspace, *call.options<OfWeight>().quantizer,
                             kBackward);
  give_codes(call, workspace);
}
template void refresh_weight<true>(Call&);
template void refresh_weight<false>(Call&);

void weight_codes(Call& call) {
  call.took(kernel_ops::kDispatcher);
  const auto& [quantizer, pieces] = call.options<OfWeight>();
  size_t gradient = pieces + kernel_ops::workspace_size;
  while (!call.has(gradient)) ++gradient;
  give_codes(call, kernel_ops::weight_codes(weight_of(call), workspace_of(call), call.in(gradient),
                                            *quantizer, {call.wants(0), call.wants(1)}));
}

namespace {
std::atomic<QuantizedWriter> quantized_writer{nullptr};

/// AOTAutograd expects the gradient of an output in the type of the output, but a tensor of codes
/// has a gradient in numbers.
bool is_compiled(Call& call) { return call.in(0).key_set().has(c10::DispatchKey::Python); }
}  // namespace

template <bool kNeedsGrad, bool kCopies>
void hand_over(Call& call) {
  const QuantizedWriter write = quantized_writer.load(std::memory_order_relaxed);
  if (write == nullptr || call.path() == Path::composite || (kNeedsGrad && is_compiled(call)))
    return dequantize(call);
  const Type& type = call.type(0);
  Codes codes{.quantizer = type.quantizer,
              .dtype = call.out_type(0).dtype,
              .sizes = call.sizes_of_numbers(0)};
  for (size_t read = 0; read < 2; ++read)
    for (size_t part = 0; call.has(read) && part < tensors_per_value(type); ++part) {
      const at::Tensor& tensor = call.in(read, part);
      // An output shares memory neither with an argument nor with another output.
      const bool is_own = type.origin == Origin::result && !kCopies;
      codes.parts[part_of(call.type(read).direction, part)] = is_own ? tensor : tensor.clone();
    }
  call.out(0, write(codes));
}
template void hand_over<true, true>(Call&);
template void hand_over<true, false>(Call&);
template void hand_over<false, true>(Call&);
template void hand_over<false, false>(Call&);

}  // namespace tandem::glue

namespace tandem {

void set_quantized_writer(QuantizedWriter writer) { glue::quantized_writer = writer; }

}  // namespace tandem
