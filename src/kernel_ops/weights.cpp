#include "kernel_ops/weights.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "kernel_ops/quantize.h"

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> optimizer_epoch{1};
std::atomic<int64_t> regions{0};
std::atomic<int64_t> made{0}, reused{0};
std::atomic<bool> check_weights{false};
thread_local int64_t region = 0;
thread_local int64_t region_depth = 0;

/// Two threads that call one pipeline must not write one workspace at once.
std::mutex& workspace_mutex() {
  static std::mutex mutex;
  return mutex;
}

enum Stamp : int64_t { data_pointer, version, epoch, stamped_region, arguments };

bool is_valid(const int64_t* stamp, const int64_t* expected, const at::Tensor& weight,
              bool backward) {
  if (weight.is_inference())
    return false;  // no version counter: a write inside inference mode leaves no trace
  for (const Stamp field : {data_pointer, version, epoch, arguments})
    if (stamp[field] != expected[field]) return false;
  return backward ||
         (expected[stamped_region] != 0 && stamp[stamped_region] == expected[stamped_region]);
}

void refresh_weight_cpu(const at::Tensor& weight, at::Tensor& codes, at::Tensor& dequant_scale,
                        at::Tensor& amax, at::Tensor& stamp, std::string_view format,
                        double amax_epsilon, bool power_of_two, bool backward) {
  TORCH_CHECK_VALUE(codes.sizes() == weight.sizes() && stamp.numel() == kStampSize,
                    "refresh_weight_: expected a workspace of shape ", weight.sizes(),
                    " with a stamp of ", kStampSize, " numbers, got ", codes.sizes(), " and ",
                    stamp.numel(),
                    ". Allocate the workspace again: the weight's shape has changed.");
  const int64_t expected[kStampSize] = {
      reinterpret_cast<int64_t>(weight.const_data_ptr()),
      weight.is_inference() ? -1 : static_cast<int64_t>(weight._version()), optimizer_epoch.load(),
      region,
      static_cast<int64_t>(std::hash<std::string_view>()(format) ^
                           std::hash<double>()(amax_epsilon + (power_of_two ? 1 : 0)))};
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  // The stamp lies on the host: on an accelerator it is copied, and nothing there waits for the device.
  const at::Tensor host = stamp.device().is_cpu() ? stamp : stamp.cpu();
  if (is_valid(host.const_data_ptr<int64_t>(), expected, weight, backward)) {
    ++reused;
    if (check_weights.load()) {
      const auto fresh =
          QuantizeCurrent::reference(weight.detach(), format, amax_epsilon, power_of_two);
      TORCH_CHECK_VALUE(
          at::equal(fresh[0], codes),
          "weight codes: expected those of the weight as it is, got stale ones. Something ",
          "writes the weight behind autograd's back: call tandem.weights_changed() after it.");
    }
    return;
  }
  ++made;
  if (weight.device().is_cpu() && has_cpu_kernel(weight.scalar_type())) {
    Results<3> results{codes, dequant_scale, amax};
    QuantizeCurrent::cpu(weight, format, amax_epsilon, power_of_two, results);
  } else {
    const auto results =
        QuantizeCurrent::reference(weight.detach(), format, amax_epsilon, power_of_two);
    codes.copy_(results[0]);
    dequant_scale.copy_(results[1]);
    amax.copy_(results[2]);
  }
  int64_t* written = host.mutable_data_ptr<int64_t>();
  std::copy(std::begin(expected), std::end(expected), written);
  if (!host.is_same(stamp)) stamp.copy_(host);
}

void refresh_weight_shapes(const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&,
                           std::string_view, double, bool, bool) {}

}  // namespace

void refresh_weight(const at::Tensor& weight, const at::Tensor& codes,
                    const at::Tensor& dequant_scale, const at::Tensor& amax,
                    const at::Tensor& stamp, std::string_view format, double amax_epsilon,
                    bool power_of_two, bool backward) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tandem::refresh_weight_", "")
                             .typed<void(const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&,
                                         at::Tensor&, std::string_view, double, bool, bool)>();
  at::Tensor parts[] = {codes, dequant_scale, amax, stamp};
  op.call(weight, parts[0], parts[1], parts[2], parts[3], format, amax_epsilon, power_of_two,
          backward);
}

void weights_changed() { ++optimizer_epoch; }

int64_t current_region() { return region; }
void enter_region() {
  if (region_depth++ == 0) region = ++regions;
}
void exit_region() {
  if (--region_depth == 0) region = 0;
}

RefreshCounts refresh_counts() { return {made.load(), reused.load()}; }
void set_check_weights(bool enabled) { check_weights.store(enabled); }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def(
      "refresh_weight_(Tensor weight, Tensor(a!) codes, Tensor(b!) dequant_scale, Tensor(c!) amax, "
      "Tensor(d!) stamp, str format, float "
      "amax_epsilon, bool power_of_two, bool backward) -> ()",
      {at::Tag::pt2_compliant_tag});
  library.impl("refresh_weight_", c10::DispatchKey::CompositeExplicitAutograd, &refresh_weight_cpu);
  library.impl("refresh_weight_", c10::DispatchKey::Meta, &refresh_weight_shapes);
  library.impl("refresh_weight_", c10::DispatchKey::Autograd,
               torch::CppFunction::makeFallthrough());
}

}  // namespace tandem::kernel_ops
