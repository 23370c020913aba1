#include "kernel_ops/weights/weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>

#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/run.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/weights/weight_signs.h"

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> made{0}, reused{0};

using Part = std::optional<at::Tensor>;

template <typename Args>
Workspace workspace_of(const Args& args) {
  const auto part = [](const Part& given) { return given.value_or(at::Tensor()); };
  return {
      part(args.row_codes),    part(args.row_scale),   part(args.row_amax), part(args.column_codes),
      part(args.column_scale), part(args.column_amax), args.amax,           args.stamp};
}
std::array<Part, group_amax> parts_of(const Workspace& workspace) {
  std::array<Part, group_amax> parts;
  for (size_t part = 0; part < parts.size(); ++part)
    if (workspace[part].defined()) parts[part] = workspace[part];
  return parts;
}

/// The source of codes: the pieces joined, detached from autograd.
at::Tensor whole(Pieces weight) {
  if (weight.size() == 1) return weight[0].detach();
  c10::SmallVector<at::Tensor, 4> detached;
  for (const at::Tensor& piece : weight) detached.push_back(piece.detach());
  return joined(detached, /*may_view=*/true);
}

}  // namespace

/// Without memory, as for meta tensors, this check is all: even a workspace in memory keeps its
/// codes.
Specs<0> RefreshWeight::shapes(const Args& args) {
  check_workspace(args.weight, workspace_of(args), args.quantizer);
  return {};
}

void RefreshWeight::cpu(const Args& args, std::span<Tensor> /*results*/) {
  const Pieces weight = args.weight;
  const Workspace workspace = workspace_of(args);
  const Quantizer& quantizer = args.quantizer;
  const bool backward = args.backward;
  const GroupMask mask = mask_of(workspace);
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  auto* const stamped = args.stamp.mutable_data_ptr<int64_t>();
  Signs signs = signs_of(weight, quantizer, mask);
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
    if (content_now && !backward) {  // equal bytes, whatever the signs say
      note_read(weight, *content_now, /*is_said_new=*/false, signs);
      std::ranges::copy(signs, stamped);
    }
    return;
  }
  ++made;
  if (!content_now) content_now = content_of(weight);
  note_read(weight, *content_now, said == Said::first_microbatch && !backward, signs);
  // Another thread may be reading codes of this weight: parts are written only if that changes
  // them.
  const bool may_be_read =
      are_on_host(weight) && stamped[storage] != 0 && stamped[content] == *content_now &&
      agree(stamped, signs, {made_by, layout}) &&
      (is_readable(weight) ||
       agree(stamped, signs, {storage, data_pointer, version_counter, version}));
  Group parts;
  std::copy_n(workspace.begin(), parts.size(), parts.begin());
  const at::Tensor source = whole(weight);
  const Quantize::Args of_source{.x = source, .quantizer = quantizer, .output_mask = mask};
  const Group results = run_choice<Quantize>(
      choose<Quantize>(of_source),
      [&](size_t i, const ResultSpec& spec) {
        return may_be_read ? empty_beside(source, C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype)
                           : parts[i];
      },
      of_source);
  const at::AutoDispatchBelowADInplaceOrView no_versions;  // versions count writes by others
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].defined() && !results[i].is_same(parts[i]) &&
        !(may_be_read && at::equal(results[i], parts[i])))
      parts[i].copy_(results[i]);
  std::ranges::copy(signs, stamped);
  stamped[content] = *content_now;
  if (recorded) stamped[storage] = 0;  // nothing is written before a replay
}

void refresh_weight(Pieces weight, const Workspace& workspace, const Quantizer& quantizer,
                    bool backward) {
  auto parts = parts_of(workspace);
  Tensor amax = workspace[group_amax], stamp = workspace[stamp_part];
  dispatch<RefreshWeight>({weight, parts[row_codes], parts[row_scale], parts[row_amax],
                           parts[column_codes], parts[column_scale], parts[column_amax], amax,
                           stamp, quantizer, backward});
}

Specs<group_amax> CodesOfWeight::shapes(const Args& args) {
  check_workspace(args.weight, workspace_of(args), args.quantizer);
  const auto all = group_specs("weight_codes", like_joined(args.weight).sym_sizes(), std::nullopt,
                               args.quantizer, {args.wanted[0], args.wanted[1], false});
  Specs<group_amax> codes;
  std::copy_n(all.begin(), codes.size(), codes.begin());
  return codes;
}

void CodesOfWeight::cpu(const Args& args, std::span<Tensor> results) {
  const Workspace workspace = workspace_of(args);
  const auto write = [&](std::span<const Tensor> codes) {
    for (size_t part = 0; part < group_amax; ++part)
      if (results[part].defined() && !codes[part].is_same(results[part]))
        results[part].copy_(codes[part]);
  };
  {
    const std::lock_guard<std::mutex> lock(workspace_mutex());
    const auto* const stamped = args.stamp.const_data_ptr<int64_t>();
    std::optional<int64_t> content_now;
    const bool is_found =
        !is_recorded(args.weight) &&
        are_codes_of(args.weight, stamped,
                     signs_of(args.weight, args.quantizer, mask_of(workspace)),
                     static_cast<Said>(stamped[said_last]), /*backward=*/true, content_now);
    ++(is_found ? reused : made);
    if (is_found) return write(workspace);
  }
  Group spare;
  std::ranges::copy(results, spare.begin());
  ImplementationNames took = 0;
  write(run<Quantize>(took, spare,
                      {.x = whole(args.weight),
                       .quantizer = args.quantizer,
                       .output_mask = {args.wanted[0], args.wanted[1], false}}));
}

std::array<at::Tensor, group_amax> weight_codes(Pieces weight, const Workspace& workspace,
                                                const at::Tensor& gradient,
                                                const Quantizer& quantizer,
                                                std::array<bool, 2> wanted) {
  const auto parts = parts_of(workspace);
  return dispatch<CodesOfWeight>({weight, parts[row_codes], parts[row_scale], parts[row_amax],
                                  parts[column_codes], parts[column_scale], parts[column_amax],
                                  workspace[group_amax], workspace[stamp_part], gradient, quantizer,
                                  wanted});
}

Specs<0> SayOfWeight::shapes(const Args& args) {
  TORCH_CHECK_VALUE(
      is_stamp(args.stamp), "say_of_weight_: expected the stamp of a workspace, int64 ",
      "of shape [", kStampSize, "], got ", args.stamp.toString(), " of shape ",
      args.stamp.sym_sizes(), ". Pass the last tensor of what quantize_weight has made.");
  TORCH_CHECK_VALUE(args.said >= 0 && args.said <= static_cast<int64_t>(Said::unchanged),
                    "say_of_weight_: expected 0, 1 or 2 (nothing, the first micro-batch, "
                    "unchanged), got ",
                    args.said, ". Pass one of them.");
  return {};
}

void SayOfWeight::cpu(const Args& args, std::span<Tensor> /*results*/) {
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  args.stamp.mutable_data_ptr<int64_t>()[said_for_next] = args.said;
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
  if (said != Said::nothing) SayOfWeight::cpu({stamp, static_cast<int64_t>(said)}, {});
  refresh_weight(weight, codes.workspace, quantizer, /*backward=*/false);
  codes.were = last_uses(stamp)[0];
  return codes;
}

std::array<CodesWere, 2> last_uses(const at::Tensor& stamp) {
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  const auto* const stamped = stamp.const_data_ptr<int64_t>();
  return {static_cast<CodesWere>(stamped[in_forward]),
          static_cast<CodesWere>(stamped[in_backward])};
}

RefreshCounts refresh_counts() { return {made.load(), reused.load()}; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  // The host decides at each call, so Inductor must keep these ops out of its CUDA graphs.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  register_of_all_dtypes<RefreshWeight>(library, tags);
  register_of_all_dtypes<CodesOfWeight>(library, tags);
  register_of_all_dtypes<SayOfWeight>(library, tags);
  // torch's kernels of these keys copy a result into the mutable argument, but these ops return
  // none.
  for (const char* op : {RefreshWeight::kName, CodesOfWeight::kName, SayOfWeight::kName})
    for (const auto key : {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate})
      library.impl(op, key, torch::CppFunction::makeFallthrough());
}

}  // namespace tandem::kernel_ops
