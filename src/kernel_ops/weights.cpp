#include "kernel_ops/weights.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/util/hash.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "kernel_ops/memory.h"
#include "kernel_ops/quantize.h"
#include "kernels/digest.h"

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> optimizer_epoch{1};
std::atomic<int64_t> regions{0};
std::atomic<int64_t> made{0}, reused{0};
thread_local int64_t region = 0;

/// Two threads that call one pipeline must not write one workspace at once.
std::mutex& workspace_mutex() {
  static std::mutex mutex;
  return mutex;
}

using HeldStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using HeldVersion = c10::VariableVersion;

bool is_dead(const HeldStorage& storage) { return storage.expired(); }
bool is_dead(const HeldVersion& version) { return version.unique(); }

/// Numbers of objects, none given twice. What is held of an object keeps its address from being
/// used again, and no data alive; what is held of dead ones goes when there are as many as of
/// living ones. Guarded by `workspace_mutex`.
template <typename Held>
class Numbers {
 public:
  int64_t of(const void* address, const Held& held) {
    if (const auto known = entries_.find(address); known != entries_.end())
      return known->second.number;
    if (entries_.size() >= limit_) {
      std::erase_if(entries_, [](const auto& entry) { return is_dead(entry.second.held); });
      limit_ = 2 * entries_.size() + 64;
    }
    entries_.emplace(address, Entry{held, ++last_});
    return last_;
  }

 private:
  struct Entry {
    Held held;
    int64_t number;
  };
  std::unordered_map<const void*, Entry> entries_;
  int64_t last_ = 0;
  size_t limit_ = 64;
};

int64_t number_of_storage(const at::Tensor& tensor) {
  static auto& numbers = *new Numbers<HeldStorage>;
  const c10::Storage& storage = tensor.storage();
  return numbers.of(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

/// Of the counter that a tensor shares with its views and with what detach() gives. A weak
/// reference to the tensor itself would not do: torch.utils.swap_tensors refuses tensors that have
/// one.
int64_t number_of_version_counter(const at::Tensor& tensor) {
  static auto& numbers = *new Numbers<HeldVersion>;
  const HeldVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  const void* counter = nullptr;  // its only member, which is private
  static_assert(sizeof(version) == sizeof(counter));
  std::memcpy(&counter, static_cast<const void*>(&version), sizeof(counter));
  return counter == nullptr ? 0 : numbers.of(counter, version);
}

enum Stamp : int64_t {
  storage,
  data_pointer,
  version_counter,
  version,
  epoch,
  stamped_region,
  arguments,
  content
};

/// Whether the bytes of a weight can be compared: on an accelerator that would wait for the device.
bool is_readable(const at::Tensor& weight) {
  return is_on_host(weight) && weight.is_non_overlapping_and_dense();
}

bool is_valid(const int64_t* stamp, const int64_t* expected, const at::Tensor& weight,
              bool backward) {
  if (weight.is_inference())
    return false;  // no version counter: a write inside inference mode leaves no trace
  if (is_on_host(weight) && !is_readable(weight)) return false;
  for (const Stamp field :
       {storage, data_pointer, version_counter, version, epoch, arguments, content})
    if (stamp[field] != expected[field]) return false;
  return backward ||
         (expected[stamped_region] != 0 && stamp[stamped_region] == expected[stamped_region]);
}

/// Whether the stamped codes are those of this weight; on an accelerator, unless it was written in
/// a way that moves no version counter.
bool is_of(const int64_t* stamp, const int64_t* expected) {
  for (const Stamp field : {storage, data_pointer, version_counter, version, arguments, content})
    if (stamp[field] != expected[field]) return false;
  return true;
}

/// What codes depend on besides the weight's numbers.
int64_t hash_of(const at::Tensor& weight, const Quantizer& quantizer, GroupMask mask) {
  size_t hash = c10::get_hash(quantizer.text, mask[0], mask[1],
                              static_cast<int>(weight.scalar_type()), weight.is_neg());
  for (const int64_t stride : weight.strides())
    hash = c10::hash_combine(hash, c10::get_hash(stride));
  return static_cast<int64_t>(hash);
}

GroupMask mask_of(const Workspace& workspace) {
  return {workspace[row_codes].defined(), workspace[column_codes].defined(),
          workspace[group_amax].defined()};
}

using Part = std::optional<at::Tensor>;

Workspace workspace_of(std::array<const Part*, group_amax> parts, const at::Tensor& amax,
                       const at::Tensor& stamp) {
  Workspace workspace;
  for (size_t part = 0; part < parts.size(); ++part)
    workspace[part] = parts[part]->value_or(at::Tensor());
  workspace[group_amax] = amax;
  workspace[stamp_part] = stamp;
  return workspace;
}

void refresh_weight_plain(const at::Tensor& weight, const Part& row_codes, const Part& row_scale,
                          const Part& row_amax, const Part& column_codes, const Part& column_scale,
                          const Part& column_amax, at::Tensor& amax, at::Tensor& stamp,
                          std::string_view text, bool backward) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  const Quantizer& quantizer = tandem::quantizer(text);
  check_workspace(weight, workspace, quantizer);
  const GroupMask mask = mask_of(workspace);
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  const int64_t expected[kStampSize] = {
      number_of_storage(weight),
      reinterpret_cast<int64_t>(weight.const_data_ptr()),
      number_of_version_counter(weight),
      weight.is_inference() ? -1 : static_cast<int64_t>(weight._version()),
      optimizer_epoch.load(),
      region,
      hash_of(weight, quantizer, mask),
      is_readable(weight)
          ? static_cast<int64_t>(kernels::cpu::digest(weight.const_data_ptr(), weight.nbytes()))
          : 0};
  if (is_valid(stamp.const_data_ptr<int64_t>(), expected, weight, backward)) {
    ++reused;
    return;
  }
  ++made;
  // Another thread, in a region of its own, may read codes of this weight: they are written only
  // where that changes them.
  const bool may_be_read = is_on_host(weight) && is_of(stamp.const_data_ptr<int64_t>(), expected);
  Group parts;
  std::copy_n(workspace.begin(), parts.size(), parts.begin());
  const at::Tensor source = weight.detach();
  const std::optional<at::Tensor> no_scale;
  const Group results = run_choice<Quantize>(
      choose<Quantize>(source, no_scale, quantizer, mask),
      [&](size_t i, const ResultSpec& spec) {
        return may_be_read ? empty_beside(source, C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype)
                           : parts[i];
      },
      source, no_scale, quantizer, mask);
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].defined() && !results[i].is_same(parts[i]) &&
        !(may_be_read && at::equal(results[i], parts[i])))
      parts[i].copy_(results[i]);
  std::copy(std::begin(expected), std::end(expected), stamp.mutable_data_ptr<int64_t>());
}

/// Without memory nothing is written: a workspace in memory, too, would keep its old codes.
void refresh_weight_shapes(const at::Tensor& weight, const Part& row_codes, const Part& row_scale,
                           const Part& row_amax, const Part& column_codes, const Part& column_scale,
                           const Part& column_amax, at::Tensor& amax, at::Tensor& stamp,
                           std::string_view text, bool) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  check_workspace(weight, workspace, quantizer(text));
}

}  // namespace

Workspace make_workspace(const at::Tensor& weight, const Quantizer& quantizer, GroupMask mask) {
  Workspace workspace;
  const auto specs = group_specs("refresh_weight_", weight, std::nullopt, quantizer, mask);
  for (size_t part = 0; part < group_size; ++part)
    if (has_part(quantizer, mask, part))
      workspace[part] = at::empty(C10_AS_INTARRAYREF_SLOW(specs[part].sizes),
                                  weight.options()
                                      .dtype(specs[part].dtype)
                                      .memory_format(at::MemoryFormat::Contiguous)
                                      .requires_grad(false));
  workspace[stamp_part] = at::zeros({kStampSize}, at::kLong);
  return workspace;
}

void check_workspace(const at::Tensor& weight, const Workspace& workspace,
                     const Quantizer& quantizer) {
  const GroupMask mask = mask_of(workspace);
  const auto specs = group_specs("refresh_weight_", weight, std::nullopt, quantizer, mask);
  const auto is_there = [&](size_t part) {
    return has_part(quantizer, mask, part) || workspace[part].defined();
  };
  for (size_t part = 0; part < workspace_size; ++part) {
    if (!is_there(part)) continue;
    const at::Tensor& tensor = workspace[part];
    const char* name = kWorkspaceNames[part];
    const bool is_stamp = part == stamp_part;
    const at::ScalarType dtype = is_stamp ? at::kLong : specs[part].dtype;
    const c10::SymInt stamp_size = kStampSize;
    const c10::SymIntArrayRef sizes =
        is_stamp ? c10::SymIntArrayRef(stamp_size) : c10::SymIntArrayRef(specs[part].sizes);
    const bool is_meta = weight.is_meta() && tensor.defined() && tensor.is_meta();
    // the stamp is read on the host
    const c10::Device device = is_stamp && !is_meta ? c10::Device(at::kCPU) : weight.device();
    TORCH_CHECK_VALUE(tensor.defined() && tensor.scalar_type() == dtype &&
                          tensor.sym_sizes() == sizes && tensor.device() == device,
                      "refresh_weight_: expected ", name, " of shape ", sizes, ", ", dtype, ", on ",
                      device, ", as the weight's workspace, got ",
                      tensor.defined()
                          ? tensor.toString() + " of shape " + c10::str(tensor.sym_sizes())
                          : "an undefined tensor",
                      ". Allocate the workspace again: the weight may have changed.");
    TORCH_CHECK_VALUE(
        tensor.is_contiguous() && !tensor.requires_grad(), "refresh_weight_: expected ", name,
        " contiguous and without a gradient, got strides ", tensor.sym_strides(),
        " and requires_grad=", tensor.requires_grad(), ". Allocate the workspace for this weight.");
    TORCH_CHECK_VALUE(!tensor.is_neg(), "refresh_weight_: expected ", name,
                      " as it lies in memory, got a negated view ",
                      "(is_neg). Allocate the workspace by itself.");
  }
  for (size_t part = 0; part < workspace_size; ++part) {
    if (!is_there(part)) continue;
    bool is_shared = workspace[part].is_alias_of(weight);
    for (size_t other = 0; other < workspace_size; ++other)
      is_shared |=
          other != part && is_there(other) &&
          at::get_overlap_status(workspace[part], workspace[other]) != at::MemOverlapStatus::No;
    TORCH_CHECK_VALUE(!is_shared || workspace[part].sym_numel() == 0, "refresh_weight_: expected ",
                      kWorkspaceNames[part],
                      " in memory of its own, got some that another part of the ",
                      "workspace or the weight shares. Allocate each part by itself.");
  }
}

void refresh_weight(const at::Tensor& weight, const Workspace& workspace,
                    const Quantizer& quantizer, bool backward) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tandem::refresh_weight_", "")
                             .typed<void(const at::Tensor&, const Part&, const Part&, const Part&,
                                         const Part&, const Part&, const Part&, at::Tensor&,
                                         at::Tensor&, std::string_view, bool)>();
  const auto part = [&](size_t i) { return workspace[i].defined() ? Part(workspace[i]) : Part(); };
  at::Tensor amax = workspace[group_amax], stamp = workspace[stamp_part];
  op.call(weight, part(row_codes), part(row_scale), part(row_amax), part(column_codes),
          part(column_scale), part(column_amax), amax, stamp, quantizer.text, backward);
}

void weights_changed() { ++optimizer_epoch; }

int64_t current_region() { return region; }
void set_region(int64_t number) { region = number; }
int64_t new_region() { return ++regions; }
int64_t last_region() { return regions; }

RefreshCounts refresh_counts() { return {made.load(), reused.load()}; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def(
      "refresh_weight_(Tensor weight, Tensor(a!)? row_codes, Tensor(b!)? row_scale, Tensor(c!)? "
      "row_amax, Tensor(d!)? column_codes, Tensor(e!)? column_scale, Tensor(f!)? column_amax, "
      "Tensor(g!) amax, Tensor(h!) stamp, str quantizer, bool backward) -> ()",
      {at::Tag::pt2_compliant_tag});
  library.impl("refresh_weight_", c10::DispatchKey::CompositeExplicitAutograd,
               &refresh_weight_plain);
  library.impl("refresh_weight_", c10::DispatchKey::Meta, &refresh_weight_shapes);
  // torch's kernels of the last two write a mutable argument back from a result, which this op has
  // none of.
  for (const auto key :
       {c10::DispatchKey::Autograd, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate})
    library.impl("refresh_weight_", key, torch::CppFunction::makeFallthrough());
}

}  // namespace tandem::kernel_ops
