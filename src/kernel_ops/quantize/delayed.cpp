#include "kernel_ops/quantize/delayed.h"

// After LegacyBatchedTensorImpl.h this header finds some names twice; clang-format would sort it
// there.
// clang-format off
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/LegacyBatchedTensorImpl.h>
// clang-format on
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <charconv>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "kernel_ops/elementwise/collective.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/weights/weights.h"

namespace tandem {

namespace {

using at::Tensor;
using kernels::AmaxAlgorithm;

constexpr std::string_view kFormat = "fp8_",
                           kMargin = "margin=", kFunction = "function=", kGroup = "group=";

std::string text_of(const ScaleUpdate& update) {
  std::string text = std::string(kFormat) + kernels::traits_of(update.scaling.format).name;
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
  const auto element = std::ranges::find_if(kernels::kFp8Formats, [&](const auto& traits) {
    return traits.bits == 8 && format == std::string(kFormat) + traits.name;
  });
  if (element == std::end(kernels::kFp8Formats)) refuse(text);
  update.scaling.format =
      static_cast<kernels::Fp8Format>(element - std::begin(kernels::kFp8Formats));
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

/// Guards all states: one thread at a time reads or writes a state.
std::mutex& state_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

/// The tensor, or a copy on the host, which reads and updates states.
Tensor on_host(const Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.cpu(); }
/// Writes a changed host copy back to its tensor.
void put_back(const Tensor& host, const Tensor& tensor) {
  if (!host.is_same(tensor)) tensor.copy_(host);
}

int64_t number_in(const Tensor& tensor) { return *on_host(tensor).const_data_ptr<int64_t>(); }
void set_number(const Tensor& tensor, int64_t number) {
  if (tensor.is_cpu()) {
    *tensor.data_ptr<int64_t>() = number;
  } else {
    tensor.fill_(number);
  }
}

/// Updates a state. `reduced`: row 0 reduced over the processes of the group, or undefined. `lock`,
/// of the state, is released while a user's function runs. No other thread finds the update due
/// meanwhile: `pending` is cleared before, and restored if the function throws.
void update_state(const ScalingState& state, const ScaleUpdate& update, const Tensor& reduced,
                  std::unique_lock<std::mutex>& lock) {
  const int64_t region = number_in(state.pending);
  set_number(state.pending, 0);
  if (update.function.empty()) {
    const Tensor history = on_host(state.amax_history), scale = on_host(state.scale),
                 amaxes = reduced.defined() ? on_host(reduced) : reduced;
    kernels::update_delayed(
        {history.data_ptr<float>(), scale.data_ptr<float>(), static_cast<size_t>(history.size(0)),
         static_cast<size_t>(history.size(1))},
        update.scaling, amaxes.defined() ? amaxes.const_data_ptr<float>() : nullptr);
    put_back(history, state.amax_history);
    put_back(scale, state.scale);
    return;
  }
  const Tensor row = state.amax_history.select(0, 0);
  if (reduced.defined()) row.copy_(at::where(reduced != 0, reduced, row));
  lock.unlock();
  try {
    function_of(update)(state.amax_history, state.scale, kernels::fp8_max(update.scaling.format));
  } catch (...) {
    lock.lock();
    set_number(state.pending, region);
    throw;
  }
  lock.lock();
}

/// The maximum over the group, element by element. All processes must pass equally many numbers.
Tensor reduced_over(const Tensor& amaxes, const std::string& name) {
  const kernel_ops::ProcessGroup group{name};
  const int64_t count = amaxes.numel();
  const Tensor counts = on_host(kernel_ops::wait(kernel_ops::start_all_reduce_max(
      at::tensor({count, -count}, at::kLong).to(amaxes.device()), group)));
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
  // Dispatched calls look updates up by text, mostly by one text.
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

/// Records the amaxes of all samples of a vmap, as a loop over the samples would: they share a
/// scale. `dims`: the dimensions of samples.
void record_each_amax(const ScalingState& state, const Tensor& amaxes, at::IntArrayRef dims,
                      const Tensor& region, const SlotRange& slots, bool counts) {
  std::vector<int64_t> front(dims.size());
  std::iota(front.begin(), front.end(), 0);
  const auto last = static_cast<int64_t>(dims.size()) - 1;
  for (const Tensor& amax : amaxes.movedim(dims, front).flatten(0, last).unbind())
    record_amax(state, amax, region, slots, counts);
}

/// record_amax_ under torch.vmap.
void record_amax_of_samples(Tensor& amax_history, Tensor& pending, const Tensor& amax,
                            const Tensor& region, int64_t slot, bool counts, int64_t stride) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const int64_t level = at::functorch::maybeCurrentDynamicLayer()->layerId();
  const auto [amaxes, dim] = at::functorch::unwrapTensorAtLevel(amax, level);
  const ScalingState state{{}, amax_history, pending};
  if (dim)
    record_each_amax(state, amaxes, {*dim}, region, {slot, stride, 0}, counts);
  else
    record_amax(state, amaxes, region, {slot, stride, 0}, counts);
}

/// record_amax_ under is_grads_batched, which has a vmap of its own.
void record_amax_of_gradients(Tensor& amax_history, Tensor& pending, const Tensor& amax,
                              const Tensor& region, int64_t slot, bool counts, int64_t stride) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::Batched);
  const ScalingState state{{}, amax_history, pending};
  const auto* batched = at::maybeGetBatchedImpl(amax);
  if (batched == nullptr) return record_amax(state, amax, region, {slot, stride, 0}, counts);
  std::vector<int64_t> dims;
  for (const auto& each : batched->bdims()) dims.push_back(each.dim());
  record_each_amax(state, batched->value(), dims, region, {slot, stride, 0}, counts);
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

Specs<1> TakeScale::shapes(const Args& args) {
  check_slots({args.scale, args.amax_history, args.pending}, args.region,
              {args.slot, args.stride, args.count});
  ResultSpec scales = scalar(at::kFloat);
  if (args.count != 0) scales.sizes = {args.count};
  return {scales};
}

void TakeScale::cpu(const Args& args, std::span<Tensor> results) {
  const ScalingState state{args.scale, args.amax_history, args.pending};
  const ScaleUpdate& update = scale_update(args.update);
  const int64_t number = number_in(args.region);
  const auto is_due = [&] {
    const int64_t held = number > 0 ? number_in(state.pending) : 0;
    return held != 0 && held != number;
  };
  std::unique_lock<std::mutex> lock(state_mutex());
  Tensor reduced;
  if (!update.group.empty() && is_due()) {
    const Tensor row = state.amax_history.select(0, 0).clone();
    lock.unlock();
    reduced = reduced_over(row, update.group);
    lock.lock();
  }
  if (is_due()) update_state(state, update, reduced, lock);
  const Tensor scales = on_host(state.scale);
  for (int64_t i = 0; i < results[0].numel(); ++i)
    results[0].data_ptr<float>()[i] = scales.const_data_ptr<float>()[args.slot + i * args.stride];
}

Results<1> TakeScale::reference(const Args& args) {
  Results<1> scales{at::empty(C10_AS_INTARRAYREF_SLOW(shapes(args)[0].sizes), at::kFloat)};
  cpu(args, scales);
  return {scales[0].to(args.scale.device())};
}

Tensor take_scale(const ScalingState& state, const Tensor& region, const SlotRange& slots,
                  const ScaleUpdate& update) {
  Tensor scale = state.scale, amax_history = state.amax_history, pending = state.pending;
  return dispatch<TakeScale>({scale, amax_history, pending, region, slots.first, update.text,
                              slots.stride, slots.count})[0];
}

Specs<0> RecordAmax::shapes(const Args& args) {
  check_slots({args.amax_history.select(0, 0), args.amax_history, args.pending}, args.region,
              {args.slot, args.stride, args.amax.numel()});
  return {};
}

void RecordAmax::cpu(const Args& args, std::span<Tensor> /*results*/) {
  const int64_t number = number_in(args.region);
  if (number <= 0) return;
  const Tensor seen = on_host(args.amax.to(at::kFloat)).contiguous();
  const std::lock_guard<std::mutex> lock(state_mutex());
  const Tensor history = on_host(args.amax_history);
  for (int64_t i = 0; i < seen.numel(); ++i) {
    float& row = history.data_ptr<float>()[args.slot + i * args.stride];
    row = std::max(row, seen.const_data_ptr<float>()[i]);  // a NaN is skipped
  }
  put_back(history, args.amax_history);
  if (args.counts) set_number(args.pending, number);
}

void record_amax(const ScalingState& state, const Tensor& amax, const Tensor& region,
                 const SlotRange& slots, bool counts) {
  Tensor amax_history = state.amax_history, pending = state.pending;
  dispatch<RecordAmax>({amax_history, pending, amax, region, slots.first, counts, slots.stride});
}

Specs<1> RegionNumber::shapes(const Args& /*args*/) { return {ResultSpec{{1}, at::kLong}}; }

void RegionNumber::cpu(const Args& /*args*/, std::span<Tensor> results) {
  const int64_t number = region_reader.load()();
  results[0].fill_(number != 0 ? number : new_region());
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
    update_state(each.state, *each.update, amaxes, lock);
  }
}

void set_region_reader(int64_t (*reader)()) { region_reader = reader; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  // The host knows the number of the region.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  register_of_all_dtypes<TakeScale>(library, tags);
  register_of_all_dtypes<RecordAmax>(library, tags);
  library.impl("record_amax_", c10::DispatchKey::FuncTorchBatched, &record_amax_of_samples);
  library.impl("record_amax_", c10::DispatchKey::Batched, &record_amax_of_gradients);
  // Two draws of a number are two regions, so a compiler must not merge them.
  register_of_all_dtypes<RegionNumber>(
      library,
      {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe, at::Tag::nondeterministic_seeded});
}

}  // namespace kernel_ops
}  // namespace tandem
