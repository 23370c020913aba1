#include "kernel_ops/weights/weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/weights/weight_signs.h"

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> made{0}, reused{0};

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
    if (content_now && !backward) {  // the same bytes, whatever the signs say
      note_read(weight, *content_now, /*is_said_new=*/false, signs);
      std::ranges::copy(signs, stamped);
    }
    return;
  }
  ++made;
  if (!content_now) content_now = content_of(weight);
  note_read(weight, *content_now, said == Said::first_microbatch && !backward, signs);
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
      result[part] = at::empty({0}, amax.options().dtype(dtype_of_part(quantizer, part)));
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
