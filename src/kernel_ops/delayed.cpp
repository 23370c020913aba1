#include "kernel_ops/delayed.h"

#include <ATen/TensorIndexing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernel_ops/collective.h"
#include "kernel_ops/kernel_op.h"
#include "kernel_ops/weights.h"

namespace tandem {

namespace {

using at::Tensor;
using kernels::AmaxAlgorithm;

constexpr std::string_view kMargin = "margin=", kFunction = "function=", kGroup = "group=";

std::string text_of(const ScaleUpdate& update) {
  std::string text = update.scaling.format == kernels::Fp8Format::e4m3 ? "fp8_e4m3" : "fp8_e5m2";
  text += ":" + std::string(kMargin) + std::to_string(update.scaling.margin);
  text += update.scaling.algorithm == AmaxAlgorithm::max ? ":max" : ":most_recent";
  if (!update.function.empty()) text += ":" + std::string(kFunction) + update.function;
  if (!update.group.empty()) text += ":" + std::string(kGroup) + update.group;
  return text;
}

[[noreturn]] void refuse(std::string_view text) {
  TORCH_CHECK_VALUE(false, "scale update: expected FORMAT:margin=NUMBER:max or :most_recent, then ",
                    "function=NAME, then group=NAME, got \"", text,
                    "\". Write it as the recipe does.");
}

ScaleUpdate parsed(std::string_view text) {
  ScaleUpdate update;
  std::string_view rest = text;
  const auto next = [&] {
    const size_t end = std::min(rest.find(':'), rest.size());
    const std::string_view part = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return part;
  };
  const std::string_view format = next(), margin = next(), algorithm = next();
  if (format != "fp8_e4m3" && format != "fp8_e5m2") refuse(text);
  update.scaling.format =
      format == "fp8_e4m3" ? kernels::Fp8Format::e4m3 : kernels::Fp8Format::e5m2;
  if (!margin.starts_with(kMargin)) refuse(text);
  const char* const end = margin.data() + margin.size();
  const auto read = std::from_chars(margin.data() + kMargin.size(), end, update.scaling.margin);
  if (read.ec != std::errc() || read.ptr != end) refuse(text);
  if (algorithm != "max" && algorithm != "most_recent") refuse(text);
  update.scaling.algorithm = algorithm == "max" ? AmaxAlgorithm::max : AmaxAlgorithm::most_recent;
  if (rest.starts_with(kFunction)) update.function = next().substr(kFunction.size());
  if (rest.starts_with(kGroup)) {
    update.group = rest.substr(kGroup.size());
    rest = {};
  }
  if (!rest.empty()) refuse(text);
  return update;
}

std::mutex& table_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

auto& functions() {
  static auto& functions = *new std::map<std::string, ScaleUpdateFunction>;
  return functions;
}

ScaleUpdateFunction function_of(const ScaleUpdate& update) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  const auto found = functions().find(update.function);
  TORCH_CHECK_VALUE(found != functions().end(),
                    "scale update: expected a registered function, got ", update.function,
                    ", which this process does not know. Make the recipe again.");
  return found->second;
}

/// A state is read and written by one thread at a time.
std::mutex& state_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

kernels::DelayedState view_of(const ScalingState& state) {
  return {state.amax_history.data_ptr<float>(), state.scale.data_ptr<float>(),
          static_cast<size_t>(state.amax_history.size(0)),
          static_cast<size_t>(state.amax_history.size(1))};
}

int64_t& pending_of(const ScalingState& state) { return *state.pending.data_ptr<int64_t>(); }

/// `reduced`: row 0 over all processes of the group, or undefined. Under the lock but where a
/// function of the user runs.
void update_state(const ScalingState& state, const ScaleUpdate& update, const Tensor& reduced) {
  const kernels::DelayedState view = view_of(state);
  const float* amax = reduced.defined() ? reduced.const_data_ptr<float>() : nullptr;
  if (update.function.empty()) {
    kernels::update_delayed(view, update.scaling, amax);
  } else {
    for (size_t slot = 0; amax != nullptr && slot < view.slots; ++slot)
      if (amax[slot] != 0) view.amax_history[slot] = amax[slot];
    function_of(update)(state.amax_history, state.scale, kernels::fp8_max(update.scaling.format));
  }
  pending_of(state) = 0;
}

/// The largest over the group, element by element. Every process must come with as many numbers.
Tensor reduced_over(const Tensor& amaxes, const std::string& name) {
  const kernel_ops::Group group{name};
  const int64_t count = amaxes.numel();
  const Tensor counts = kernel_ops::wait(
      kernel_ops::start_all_reduce_max(at::tensor({count, -count}, at::kLong), group));
  const int64_t most = counts.const_data_ptr<int64_t>()[0],
                least = -counts.const_data_ptr<int64_t>()[1];
  TORCH_CHECK(most == least, "autocast: expected every process of the amax group to have called ",
              "the same modules in this region, got between ", least, " and ", most,
              " amaxes. Call them on every process, or use DelayedScaling(reduce_amax=False).");
  return kernel_ops::wait(kernel_ops::start_all_reduce_max(amaxes, group));
}

}  // namespace

const ScaleUpdate& scale_update(ScaleUpdate update) {
  update.text = text_of(update);
  static auto& updates =
      *new std::map<std::string, std::unique_ptr<const ScaleUpdate>, std::less<>>;
  const std::lock_guard<std::mutex> lock(table_mutex());
  auto& entry = updates[update.text];
  if (!entry) entry = std::make_unique<const ScaleUpdate>(std::move(update));
  return *entry;
}

const ScaleUpdate& scale_update(std::string_view text) {
  // Calls through the dispatcher ask by text, and mostly for the same.
  thread_local const ScaleUpdate* last = nullptr;
  if (last == nullptr || last->text != text) last = &scale_update(parsed(text));
  return *last;
}

void register_scale_update(std::string name, ScaleUpdateFunction function) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  functions()[std::move(name)] = std::move(function);
}

at::Tensor resized_history(const at::Tensor& amax_history, int64_t length) {
  at::Tensor resized = at::zeros({length, amax_history.size(1)}, amax_history.options());
  const int64_t past = std::min(length, amax_history.size(0)) - 1;
  resized[0].copy_(amax_history[0]);
  if (past > 0)
    resized.narrow(0, length - past, past)
        .copy_(amax_history.narrow(0, amax_history.size(0) - past, past));
  return resized;
}

namespace kernel_ops {

namespace {

std::atomic<int64_t (*)()> region_reader{&current_region};

void check_slots(const ScalingState& state, const Tensor& region, const SlotRange& slots) {
  TORCH_CHECK_VALUE(region.sym_numel() == 1 && region.scalar_type() == at::kLong,
                    "delayed scaling: expected region as one int64, got shape ", region.sym_sizes(),
                    ", ", region.scalar_type(), ". Pass tandem::region_number's.");
  TORCH_CHECK_VALUE(slots.stride >= 1 && slots.count >= 0,
                    "delayed scaling: expected slots with a stride of at least 1 and a count of at "
                    "least 0, got ",
                    slots.stride, " and ", slots.count, ". Number the slots upwards.");
  const int64_t last = slots.first + slots.stride * std::max<int64_t>(slots.count - 1, 0);
  check_state(state, slots.first, last - slots.first + 1);
}

c10::SmallVector<int64_t, 1> sizes_of_slots(int64_t count) {
  return count == 0 ? c10::SmallVector<int64_t, 1>() : c10::SmallVector<int64_t, 1>{count};
}

Tensor take_scale_cpu(Tensor& scale, Tensor& amax_history, Tensor& pending, const Tensor& region,
                      int64_t slot, std::string_view text, int64_t stride, int64_t count) {
  const ScalingState state{scale, amax_history, pending};
  check_slots(state, region, {slot, stride, count});
  const ScaleUpdate& update = scale_update(text);
  const int64_t number = *region.const_data_ptr<int64_t>();
  Tensor reduced;
  const bool is_due = [&] {
    const std::lock_guard<std::mutex> lock(state_mutex());
    return number > 0 && pending_of(state) != 0 && pending_of(state) != number;
  }();
  if (is_due && !update.group.empty())
    reduced = reduced_over(amax_history.select(0, 0).clone(), update.group);
  if (is_due) {
    std::unique_lock<std::mutex> lock(state_mutex());
    if (!update.function.empty()) lock.unlock();
    update_state(state, update, reduced);
  }
  Tensor result = at::empty(sizes_of_slots(count), scale.options());
  const std::lock_guard<std::mutex> lock(state_mutex());
  for (int64_t i = 0; i < result.numel(); ++i)
    result.data_ptr<float>()[i] = scale.const_data_ptr<float>()[slot + i * stride];
  return result;
}

Tensor take_scale_shape(Tensor& scale, Tensor& amax_history, Tensor& pending, const Tensor& region,
                        int64_t slot, std::string_view, int64_t stride, int64_t count) {
  check_slots({scale, amax_history, pending}, region, {slot, stride, count});
  return at::empty(sizes_of_slots(count), scale.options());
}

void record_amax_cpu(Tensor& amax_history, Tensor& pending, const Tensor& amax,
                     const Tensor& region, int64_t slot, bool counts, int64_t stride) {
  check_slots({amax_history.select(0, 0), amax_history, pending}, region,
              {slot, stride, amax.numel()});
  const int64_t number = *region.const_data_ptr<int64_t>();
  if (number <= 0) return;
  const Tensor seen = amax.to(at::kFloat).contiguous();
  const std::lock_guard<std::mutex> lock(state_mutex());
  for (int64_t i = 0; i < seen.numel(); ++i) {
    float& row = amax_history.data_ptr<float>()[slot + i * stride];
    row = std::max(row, seen.const_data_ptr<float>()[i]);  // of a number and NaN the number
  }
  if (counts) *pending.data_ptr<int64_t>() = number;
}

void record_amax_shape(Tensor& amax_history, Tensor& pending, const Tensor& amax,
                       const Tensor& region, int64_t slot, bool, int64_t stride) {
  check_slots({amax_history.select(0, 0), amax_history, pending}, region,
              {slot, stride, amax.numel()});
}

/// A number of its own where there is no region: a step of compiled code that has entered one.
Tensor region_number(const Tensor& like) {
  const int64_t number = region_reader.load()();
  return at::tensor({number != 0 ? number : new_region()}, like.options().dtype(at::kLong));
}

Tensor region_number_shape(const Tensor& like) {
  return at::empty({1}, like.options().dtype(at::kLong));
}

}  // namespace

void check_state(const ScalingState& state, int64_t first, int64_t count) {
  const auto is_float = [](const Tensor& tensor, int64_t dim) {
    return tensor.defined() && tensor.scalar_type() == at::kFloat && tensor.dim() == dim &&
           tensor.is_contiguous();
  };
  TORCH_CHECK_VALUE(
      is_float(state.scale, 1) && is_float(state.amax_history, 2) &&
          state.amax_history.sym_size(0) >= 1 &&
          state.amax_history.sym_size(1) == state.scale.sym_size(0) && state.pending.defined() &&
          state.pending.scalar_type() == at::kLong && state.pending.sym_numel() == 1,
      "delayed scaling: expected scale [slots] and amax_history [length, slots] in contiguous "
      "float32, and pending [1] in int64, got ",
      state.scale.defined() ? c10::str(state.scale.sym_sizes()) : "nothing", " and ",
      state.amax_history.defined() ? c10::str(state.amax_history.sym_sizes()) : "nothing",
      ". Pass the buffers of the module's recipe_state.");
  TORCH_CHECK_VALUE(first >= 0 && state.scale.sym_size(0) >= first + count,
                    "delayed scaling: expected state with at least ", first + count, " slots, got ",
                    state.scale.sym_size(0),
                    ". Pass the state of the module whose products these are.");
}

Tensor take_scale(const ScalingState& state, const Tensor& region, const SlotRange& slots,
                  const ScaleUpdate& update) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tandem::take_scale_", "")
                             .typed<Tensor(Tensor&, Tensor&, Tensor&, const Tensor&, int64_t,
                                           std::string_view, int64_t, int64_t)>();
  Tensor scale = state.scale, amax_history = state.amax_history, pending = state.pending;
  return op.call(scale, amax_history, pending, region, slots.first, update.text, slots.stride,
                 slots.count);
}

void record_amax(const ScalingState& state, const Tensor& amax, const Tensor& region,
                 const SlotRange& slots, bool counts) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tandem::record_amax_", "")
          .typed<void(Tensor&, Tensor&, const Tensor&, const Tensor&, int64_t, bool, int64_t)>();
  Tensor amax_history = state.amax_history, pending = state.pending;
  op.call(amax_history, pending, amax, region, slots.first, counts, slots.stride);
}

void update_states(std::span<const PendingUpdate> states) {
  std::map<std::string, std::vector<Tensor>> rows;  // by group
  {
    const std::lock_guard<std::mutex> lock(state_mutex());
    for (const PendingUpdate& each : states)
      if (!each.update->group.empty())
        rows[each.update->group].push_back(each.state.amax_history.select(0, 0).clone());
  }
  std::map<std::string, Tensor> reduced;
  for (const auto& [group, amaxes] : rows) reduced[group] = reduced_over(at::cat(amaxes), group);
  std::map<std::string, int64_t> next;
  for (const PendingUpdate& each : states) {
    Tensor amaxes;
    if (const std::string& group = each.update->group; !group.empty()) {
      const int64_t slots = each.state.scale.size(0);
      amaxes = reduced.at(group).narrow(0, next[group], slots);
      next[group] += slots;
    }
    std::unique_lock<std::mutex> lock(state_mutex());
    if (!each.update->function.empty()) lock.unlock();
    update_state(each.state, *each.update, amaxes);
  }
}

void set_region_reader(int64_t (*reader)()) { region_reader = reader; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  // What region it is the host knows.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  library.def(
      "take_scale_(Tensor(a!) scale, Tensor(b!) amax_history, Tensor(c!) pending, Tensor region, "
      "int slot, str update, int stride=1, int count=0) -> Tensor",
      tags);
  library.impl("take_scale_", c10::DispatchKey::CPU, &take_scale_cpu);
  library.impl("take_scale_", c10::DispatchKey::Meta, &take_scale_shape);
  library.def(
      "record_amax_(Tensor(a!) amax_history, Tensor(b!) pending, Tensor amax, Tensor region, int "
      "slot, bool counts, int stride=1) -> ()",
      tags);
  library.impl("record_amax_", c10::DispatchKey::CPU, &record_amax_cpu);
  library.impl("record_amax_", c10::DispatchKey::Meta, &record_amax_shape);
  // Two draws of a number are two regions: no compiler may merge them.
  library.def(
      "region_number(Tensor like) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe, at::Tag::nondeterministic_seeded});
  library.impl("region_number", c10::DispatchKey::CPU, &region_number);
  library.impl("region_number", c10::DispatchKey::Meta, &region_number_shape);
  for (const char* name : {"take_scale_", "record_amax_", "region_number"})
    library.impl(name, c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
}

}  // namespace kernel_ops
}  // namespace tandem
