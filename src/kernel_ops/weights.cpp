#include "kernel_ops/weights.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "kernel_ops/gradient.h"
#include "kernel_ops/join.h"
#include "kernel_ops/memory.h"
#include "kernel_ops/quantize.h"
#include "kernels/digest.h"

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> optimizer_epoch{1};
std::atomic<int64_t> regions{0};
std::atomic<int64_t> made{0}, reused{0};
thread_local int64_t region = 0;
thread_local Said said_in_thread = Said::nothing;

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

/// Whether the device records what it is given, to run it again when nobody asks here: then the
/// codes are part of what is recorded. Up to torch 2.11 a stream cannot be asked.
template <typename Stream = c10::Stream>
bool is_recorded(Pieces weight) {
  const c10::Device device = weight[0].device();
  if constexpr (requires(const Stream& stream) { stream.is_capturing(); }) {
    if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return false;
    const Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    return stream.is_capturing();
  }
  return false;
}

enum Stamp : int64_t {
  storage,
  data_pointer,
  version_counter,
  version,
  epoch,
  stamped_region,
  made_by,
  layout,
  content,
  said_for_next,
  said_last,
  in_forward,
  in_backward
};
using Signs = std::array<int64_t, content>;

bool are_on_host(Pieces weight) { return is_on_host(weight[0]); }  // and so are the others

/// Whether the bytes of a weight can be compared: on an accelerator that would wait for the device.
bool is_readable(Pieces weight) {
  return are_on_host(weight) && std::ranges::all_of(weight, [](const at::Tensor& piece) {
           return piece.is_non_overlapping_and_dense();
         });
}

/// One number of those of all pieces, another where one of them is; of one piece its own.
template <typename Of>
int64_t combined(Pieces weight, Of&& number_of) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  auto number = static_cast<uint64_t>(number_of(weight[0]));
  for (const at::Tensor& piece : weight.slice(1))
    number = number * kOdd + static_cast<uint64_t>(number_of(piece));
  return static_cast<int64_t>(number);
}

int64_t content_of(Pieces weight) {
  if (!is_readable(weight)) return 0;
  return combined(weight, [](const at::Tensor& piece) {
    return kernels::cpu::digest(piece.const_data_ptr(), piece.nbytes());
  });
}

/// Without a version counter a write inside inference mode leaves no sign.
bool has_versions(Pieces weight) {
  return std::ranges::none_of(weight, [](const at::Tensor& piece) { return piece.is_inference(); });
}

int64_t hash_of(const Quantizer& quantizer) {
  return static_cast<int64_t>(c10::get_hash(quantizer.text));
}

/// What codes depend on besides the weight's numbers and the quantizer.
int64_t hash_of(const at::Tensor& weight, GroupMask mask) {
  size_t hash =
      c10::get_hash(mask[0], mask[1], static_cast<int>(weight.scalar_type()), weight.is_neg());
  for (const int64_t size : weight.sizes()) hash = c10::hash_combine(hash, c10::get_hash(size));
  for (const int64_t stride : weight.strides())
    hash = c10::hash_combine(hash, c10::get_hash(stride));
  return static_cast<int64_t>(hash);
}

/// All that is seen of a weight without a look at its bytes.
Signs signs_of(Pieces weight, const Quantizer& quantizer, GroupMask mask) {
  const auto address_of = [](const at::Tensor& piece) {
    return reinterpret_cast<int64_t>(piece.const_data_ptr());
  };
  const auto version_of = [](const at::Tensor& piece) {
    return piece.is_inference() ? -1 : static_cast<int64_t>(piece._version());
  };
  return {combined(weight, number_of_storage),
          combined(weight, address_of),
          combined(weight, number_of_version_counter),
          combined(weight, version_of),
          optimizer_epoch.load(),
          region,
          hash_of(quantizer),
          combined(weight, [&](const at::Tensor& piece) { return hash_of(piece, mask); })};
}

bool agree(const int64_t* stamp, const Signs& signs, std::initializer_list<Stamp> fields) {
  return std::ranges::all_of(
      fields, [&](Stamp field) { return stamp[field] == signs[static_cast<size_t>(field)]; });
}

/// Whether the codes serve, by the signs and, where that is needed, the bytes, which `content_now`
/// then is the digest of.
bool are_codes_of(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward,
                  std::optional<int64_t>& content_now) {
  if (stamp[storage] == 0 || !agree(stamp, signs, {made_by, layout})) return false;
  const bool has_signs =
      has_versions(weight) &&
      agree(stamp, signs, {storage, data_pointer, version_counter, version, epoch});
  if (said == Said::unchanged && has_signs) return true;
  if (said == Said::first_microbatch && !backward) return false;
  if (are_on_host(weight)) {
    if (!is_readable(weight)) return false;
    content_now = content_of(weight);
    return stamp[content] == *content_now;
  }
  return has_signs &&
         (backward || (signs[stamped_region] != 0 && agree(stamp, signs, {stamped_region})));
}

/// Why codes that do not serve do not.
CodesWere reason(Pieces weight, const int64_t* stamp, const Signs& signs, Said said,
                 bool backward) {
  if (stamp[storage] == 0)
    return stamp[in_forward] == 0 ? CodesWere::first_used
                                  : static_cast<CodesWere>(stamp[in_forward]);
  if (!agree(stamp, signs, {made_by})) return CodesWere::of_another_recipe;
  if (said == Said::first_microbatch && !backward) return CodesWere::of_the_last_step;
  if (are_on_host(weight) && !is_readable(weight)) return CodesWere::not_comparable;
  if (!agree(stamp, signs, {storage, data_pointer, version_counter, layout}))
    return CodesWere::of_another_tensor;
  if (!agree(stamp, signs, {version})) return CodesWere::of_another_version;
  if (!agree(stamp, signs, {epoch})) return CodesWere::before_an_optimizer_step;
  if (are_on_host(weight)) return CodesWere::of_other_bytes;
  if (!has_versions(weight)) return CodesWere::not_comparable;
  return signs[stamped_region] == 0 ? CodesWere::outside_any_region : CodesWere::of_another_region;
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

/// What codes are made of: no gradient is recorded.
at::Tensor whole(Pieces weight) {
  if (weight.size() == 1) return weight[0].detach();
  c10::SmallVector<at::Tensor, 4> detached;
  for (const at::Tensor& piece : weight) detached.push_back(piece.detach());
  return joined(detached, /*may_view=*/true);
}

void refresh_weight_plain(Pieces weight, const Part& row_codes, const Part& row_scale,
                          const Part& row_amax, const Part& column_codes, const Part& column_scale,
                          const Part& column_amax, at::Tensor& amax, at::Tensor& stamp,
                          std::string_view text, bool backward) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  const Quantizer& quantizer = tandem::quantizer(text);
  check_workspace(weight, workspace, quantizer);
  const GroupMask mask = mask_of(workspace);
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  auto* const stamped = stamp.mutable_data_ptr<int64_t>();
  const Signs signs = signs_of(weight, quantizer, mask);
  if (!backward) {
    const auto said_before = static_cast<Said>(std::exchange(stamped[said_for_next], 0));
    stamped[said_last] =
        static_cast<int64_t>(said_before == Said::nothing ? said_now() : said_before);
  }
  const auto said = static_cast<Said>(stamped[said_last]);
  std::optional<int64_t> content_now;
  const bool recorded = is_recorded(weight);
  const bool is_found =
      !recorded && are_codes_of(weight, stamped, signs, said, backward, content_now);
  const CodesWere were = is_found   ? CodesWere::found
                         : recorded ? CodesWere::recorded
                                    : reason(weight, stamped, signs, said, backward);
  stamped[backward ? in_backward : in_forward] = static_cast<int64_t>(were);
  if (!backward) stamped[in_backward] = 0;
  if (is_found) {
    ++reused;
    return;
  }
  ++made;
  if (!content_now) content_now = content_of(weight);
  // Another thread may read codes of this weight: they are written only where that changes them.
  const bool may_be_read =
      are_on_host(weight) && stamped[storage] != 0 && stamped[content] == *content_now &&
      agree(stamped, signs, {made_by, layout}) &&
      (is_readable(weight) ||
       agree(stamped, signs, {storage, data_pointer, version_counter, version}));
  Group parts;
  std::copy_n(workspace.begin(), parts.size(), parts.begin());
  const at::Tensor source = whole(weight);
  const std::optional<at::Tensor> no_scale;
  const Group results = run_choice<Quantize>(
      choose<Quantize>(source, no_scale, quantizer, mask),
      [&](size_t i, const ResultSpec& spec) {
        return may_be_read ? empty_beside(source, C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype)
                           : parts[i];
      },
      source, no_scale, quantizer, mask);
  const at::AutoDispatchBelowADInplaceOrView no_versions;  // which tell of others' writes
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].defined() && !results[i].is_same(parts[i]) &&
        !(may_be_read && at::equal(results[i], parts[i])))
      parts[i].copy_(results[i]);
  std::ranges::copy(signs, stamped);
  stamped[content] = *content_now;
  if (recorded) stamped[storage] = 0;  // nothing has been written yet
}

/// Without memory nothing is written: a workspace in memory, too, would keep its old codes.
void refresh_weight_shapes(Pieces weight, const Part& row_codes, const Part& row_scale,
                           const Part& row_amax, const Part& column_codes, const Part& column_scale,
                           const Part& column_amax, at::Tensor& amax, at::Tensor& stamp,
                           std::string_view text, bool) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  check_workspace(weight, workspace, quantizer(text));
}

using SixTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

SixTensors as_tuple(std::array<at::Tensor, group_amax>&& parts) {
  return std::apply([](auto&&... part) { return SixTensors(std::move(part)...); },
                    std::move(parts));
}

SixTensors weight_codes_plain(Pieces weight, const Part& row_codes, const Part& row_scale,
                              const Part& row_amax, const Part& column_codes,
                              const Part& column_scale, const Part& column_amax,
                              const at::Tensor& amax, const at::Tensor& stamp,
                              const at::Tensor& /*gradient*/, std::string_view text,
                              std::array<bool, 2> wanted) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  const Quantizer& quantizer = tandem::quantizer(text);
  check_workspace(weight, workspace, quantizer);
  const GroupMask asked = written_of(quantizer, {wanted[0], wanted[1], false});
  std::array<at::Tensor, group_amax> result;
  bool is_found = false;
  {
    const std::lock_guard<std::mutex> lock(workspace_mutex());
    const auto* const stamped = stamp.const_data_ptr<int64_t>();
    std::optional<int64_t> content_now;
    is_found = !is_recorded(weight) &&
               are_codes_of(weight, stamped, signs_of(weight, quantizer, mask_of(workspace)),
                            static_cast<Said>(stamped[said_last]), /*backward=*/true, content_now);
    ++(is_found ? reused : made);
    if (is_found)
      for (size_t part = 0; part < result.size(); ++part)
        if (is_written(quantizer, asked, part)) result[part] = workspace[part].clone();
  }
  if (!is_found) {
    Group group = dispatch<Quantize>(whole(weight), std::optional<at::Tensor>(), quantizer, asked);
    std::move(group.begin(), group.begin() + group_amax, result.begin());
  }
  for (size_t part = 0; part < result.size(); ++part)
    if (!result[part].defined())
      result[part] = at::empty(
          {0}, amax.options().dtype(part % kPartsOfCodes == 0   ? at::kByte
                                    : part % kPartsOfCodes == 1 ? quantizer.format->layout.dtype
                                                                : at::kFloat));
  return as_tuple(std::move(result));
}

SixTensors weight_codes_shapes(Pieces weight, const Part& row_codes, const Part& row_scale,
                               const Part& row_amax, const Part& column_codes,
                               const Part& column_scale, const Part& column_amax,
                               const at::Tensor& amax, const at::Tensor& stamp,
                               const at::Tensor& /*gradient*/, std::string_view text,
                               std::array<bool, 2> wanted) {
  const Workspace workspace = workspace_of(
      {&row_codes, &row_scale, &row_amax, &column_codes, &column_scale, &column_amax}, amax, stamp);
  const Quantizer& quantizer = tandem::quantizer(text);
  check_workspace(weight, workspace, quantizer);
  const GroupMask asked = written_of(quantizer, {wanted[0], wanted[1], false});
  const auto specs =
      group_specs("weight_codes", like_joined(weight), std::nullopt, quantizer, asked);
  std::array<at::Tensor, group_amax> result;
  for (size_t part = 0; part < result.size(); ++part) {
    const bool is_there = is_written(quantizer, asked, part);
    const c10::SymInt none = 0;
    result[part] = at::empty_symint(
        is_there ? c10::SymIntArrayRef(specs[part].sizes) : c10::SymIntArrayRef(none),
        weight[0]
            .options()
            .dtype(specs[part].dtype)
            .memory_format(at::MemoryFormat::Contiguous)
            .requires_grad(false));
  }
  return as_tuple(std::move(result));
}

void check_stamp(const char* op, const at::Tensor& stamp) {
  TORCH_CHECK_VALUE(is_stamp(stamp), op, ": expected the stamp of a workspace, int64 of shape [",
                    kStampSize, "], got ", stamp.toString(), " of shape ", stamp.sym_sizes(),
                    ". Pass the last tensor of what quantize_weight has made.");
}

void say_of_weight_plain(at::Tensor& stamp, int64_t said) {
  check_stamp("say_of_weight_", stamp);
  TORCH_CHECK_VALUE(said >= 0 && said <= static_cast<int64_t>(Said::unchanged),
                    "say_of_weight_: expected 0, 1 or 2 (nothing, the first micro-batch, "
                    "unchanged), got ",
                    said, ". Pass one of them.");
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  stamp.mutable_data_ptr<int64_t>()[said_for_next] = said;
}

void say_of_weight_shapes(at::Tensor& stamp, int64_t) { check_stamp("say_of_weight_", stamp); }

}  // namespace

std::string_view text_of(CodesWere codes) {
  switch (codes) {
    case CodesWere::unused:
      return "not used";
    case CodesWere::found:
      return "found";
    case CodesWere::first_used:
      return "first use";
    case CodesWere::lacking_a_direction:
      return "a direction was missing";
    case CodesWere::of_another_recipe:
      return "the recipe changed";
    case CodesWere::of_another_tensor:
      return "the weight is another tensor";
    case CodesWere::of_another_version:
      return "its version changed";
    case CodesWere::before_an_optimizer_step:
      return "an optimizer stepped";
    case CodesWere::of_other_bytes:
      return "its bytes changed without a version";
    case CodesWere::of_another_region:
      return "a region began";
    case CodesWere::outside_any_region:
      return "outside of any region";
    case CodesWere::not_comparable:
      return "its bytes cannot be compared";
    case CodesWere::of_the_last_step:
      return "the first micro-batch";
    case CodesWere::recorded:
      return "a device graph is recorded";
  }
  return "";
}

Workspace make_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask, CodesWere why) {
  const c10::InferenceMode no_inference(false);  // it must serve in every mode
  Workspace workspace;
  const auto specs =
      group_specs("refresh_weight_", like_joined(weight), std::nullopt, quantizer, mask);
  for (size_t part = 0; part < group_size; ++part)
    if (has_part(quantizer, mask, part))
      workspace[part] = at::empty(C10_AS_INTARRAYREF_SLOW(specs[part].sizes),
                                  weight[0]
                                      .options()
                                      .dtype(specs[part].dtype)
                                      .memory_format(at::MemoryFormat::Contiguous)
                                      .requires_grad(false));
  workspace[stamp_part] = at::zeros({kStampSize}, at::kLong);
  workspace[stamp_part].mutable_data_ptr<int64_t>()[in_forward] = static_cast<int64_t>(why);
  return workspace;
}

Workspace fitting_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                            const Workspace& workspace) {
  const at::Tensor& stamp = workspace[stamp_part];
  CodesWere why = CodesWere::first_used;
  if (stamp.defined()) {
    const auto specs =
        group_specs("quantize_weight", like_joined(weight), std::nullopt, quantizer, mask);
    bool has_all = true, fits = true;
    for (size_t part = 0; part < group_size; ++part) {
      if (!has_part(quantizer, mask, part)) continue;
      const at::Tensor& tensor = workspace[part];
      has_all &= tensor.defined();
      fits &= tensor.defined() && tensor.scalar_type() == specs[part].dtype &&
              tensor.sym_sizes() == c10::SymIntArrayRef(specs[part].sizes) &&
              tensor.device() == weight[0].device();
    }
    if (fits) return workspace;
    const int64_t by = stamp.const_data_ptr<int64_t>()[made_by];
    why = by != 0 && by != hash_of(quantizer) ? CodesWere::of_another_recipe
          : has_all                           ? CodesWere::of_another_tensor
                                              : CodesWere::lacking_a_direction;
  }
  return make_workspace(weight, quantizer, mask, why);
}

void check_workspace(Pieces weight, const Workspace& workspace, const Quantizer& quantizer) {
  const GroupMask mask = mask_of(workspace);
  const auto specs =
      group_specs("refresh_weight_", like_joined(weight), std::nullopt, quantizer, mask);
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
    const bool is_meta = weight[0].is_meta() && tensor.defined() && tensor.is_meta();
    // the stamp is read on the host
    const c10::Device device = is_stamp && !is_meta ? c10::Device(at::kCPU) : weight[0].device();
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
  // Of sizes that are symbols there is no memory.
  const auto has_memory = [&](size_t part) {
    return is_there(part) && !workspace[part].unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  for (size_t part = 0; part < workspace_size; ++part) {
    if (!has_memory(part)) continue;
    bool is_shared = std::ranges::any_of(
        weight, [&](const at::Tensor& piece) { return workspace[part].is_alias_of(piece); });
    for (size_t other = 0; other < workspace_size; ++other)
      is_shared |=
          other != part && has_memory(other) &&
          at::get_overlap_status(workspace[part], workspace[other]) != at::MemOverlapStatus::No;
    TORCH_CHECK_VALUE(!is_shared || workspace[part].sym_numel() == 0, "refresh_weight_: expected ",
                      kWorkspaceNames[part],
                      " in memory of its own, got some that another part of the ",
                      "workspace or the weight shares. Allocate each part by itself.");
  }
}

void refresh_weight(Pieces weight, const Workspace& workspace, const Quantizer& quantizer,
                    bool backward) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tandem::refresh_weight_", "")
          .typed<void(Pieces, const Part&, const Part&, const Part&, const Part&, const Part&,
                      const Part&, at::Tensor&, at::Tensor&, std::string_view, bool)>();
  const auto part = [&](size_t i) { return workspace[i].defined() ? Part(workspace[i]) : Part(); };
  at::Tensor amax = workspace[group_amax], stamp = workspace[stamp_part];
  op.call(weight, part(row_codes), part(row_scale), part(row_amax), part(column_codes),
          part(column_scale), part(column_amax), amax, stamp, quantizer.text, backward);
}

WeightCodes quantize_weight(const at::Tensor& weight, const Quantizer& quantizer, GroupMask mask,
                            const Workspace& workspace, Said said) {
  check_no_gradient("quantize_weight", weight);
  TORCH_CHECK_NOT_IMPLEMENTED(
      given_to(quantizer) == Given::nothing,
      "quantize_weight: expected a quantizer whose codes depend on the weight alone, got ",
      quantizer.text, ". Quantize with a scale or a seed of your own in each call.");
  WeightCodes codes{fitting_workspace(weight, quantizer, {mask[0], mask[1], true}, workspace)};
  at::Tensor& stamp = codes.workspace[stamp_part];
  if (said != Said::nothing) say_of_weight_plain(stamp, static_cast<int64_t>(said));
  refresh_weight(weight, codes.workspace, quantizer, /*backward=*/false);
  codes.were = last_uses(stamp)[0];
  return codes;
}

std::array<at::Tensor, group_amax> weight_codes(Pieces weight, const Workspace& workspace,
                                                const at::Tensor& gradient,
                                                const Quantizer& quantizer,
                                                std::array<bool, 2> wanted) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tandem::weight_codes", "")
          .typed<SixTensors(Pieces, const Part&, const Part&, const Part&, const Part&, const Part&,
                            const Part&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            std::string_view, std::array<bool, 2>)>();
  const auto part = [&](size_t i) { return workspace[i].defined() ? Part(workspace[i]) : Part(); };
  return std::apply(
      [](auto&&... each) { return std::array<at::Tensor, group_amax>{std::move(each)...}; },
      op.call(weight, part(row_codes), part(row_scale), part(row_amax), part(column_codes),
              part(column_scale), part(column_amax), workspace[group_amax], workspace[stamp_part],
              gradient, quantizer.text, wanted));
}

std::array<CodesWere, 2> last_uses(const at::Tensor& stamp) {
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  const auto* const stamped = stamp.const_data_ptr<int64_t>();
  return {static_cast<CodesWere>(stamped[in_forward]),
          static_cast<CodesWere>(stamped[in_backward])};
}

int64_t number_of_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  return number_of_storage(tensor);
}

bool is_stamp(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong && tensor.dim() == 1 &&
         tensor.sym_size(0) == kStampSize && tensor.is_contiguous();
}

Said said_now() { return said_in_thread; }
void say(Said said) { said_in_thread = said; }

void weights_changed() { ++optimizer_epoch; }

int64_t current_region() { return region; }
void set_region(int64_t number) { region = number; }
int64_t new_region() { return ++regions; }
int64_t last_region() { return regions; }

RefreshCounts refresh_counts() { return {made.load(), reused.load()}; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  // The host decides, at each call: Inductor leaves such ops between the CUDA graphs that it makes.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  library.def(
      "refresh_weight_(Tensor[] weight, Tensor(a!)? row_codes, Tensor(b!)? row_scale, Tensor(c!)? "
      "row_amax, Tensor(d!)? column_codes, Tensor(e!)? column_scale, Tensor(f!)? column_amax, "
      "Tensor(g!) amax, Tensor(h!) stamp, str quantizer, bool backward) -> ()",
      tags);
  library.impl("refresh_weight_", c10::DispatchKey::CompositeExplicitAutograd,
               &refresh_weight_plain);
  library.impl("refresh_weight_", c10::DispatchKey::Meta, &refresh_weight_shapes);
  library.def(
      "weight_codes(Tensor[] weight, Tensor? row_codes, Tensor? row_scale, Tensor? row_amax, "
      "Tensor? "
      "column_codes, Tensor? column_scale, Tensor? column_amax, Tensor amax, Tensor stamp, Tensor "
      "gradient, str quantizer, bool[2] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)",
      tags);
  library.impl("weight_codes", c10::DispatchKey::CompositeExplicitAutograd, &weight_codes_plain);
  library.impl("weight_codes", c10::DispatchKey::Meta, &weight_codes_shapes);
  library.def("say_of_weight_(Tensor(a!) stamp, int said) -> ()", tags);
  library.impl("say_of_weight_", c10::DispatchKey::CompositeExplicitAutograd, &say_of_weight_plain);
  library.impl("say_of_weight_", c10::DispatchKey::Meta, &say_of_weight_shapes);
  // torch's kernels of the last two write a mutable argument back from a result, which these ops
  // have none of.
  for (const char* op : {"refresh_weight_", "weight_codes", "say_of_weight_"})
    for (const auto key :
         {c10::DispatchKey::Autograd, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate})
      library.impl(op, key, torch::CppFunction::makeFallthrough());
}

}  // namespace tandem::kernel_ops
