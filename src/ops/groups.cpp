#include "ops/groups.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <sstream>

#include "kernel_ops/framework/shapes.h"
#include "ops/deferred.h"
#include "ops/product.h"

namespace tandem::ops {

using at::Tensor;

namespace {

size_t main_grad_count(const GroupedLinearOptions& options) {
  return options.packed_weight ? 1 : options.num_groups;
}

}  // namespace

Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape_symint({kernel_ops::rows_of(x), x.sym_size(-1)});
}

std::optional<Tensor> flat(const Call& call, size_t read) {
  if (!call.has(read)) return std::nullopt;
  const Tensor& vector = call.in(read);
  return vector.dim() == 1 && vector.is_contiguous() ? vector : vector.reshape({-1});
}

kernel_ops::GroupQuantizer quantizer_at(const Call& call, size_t place) {
  const auto& quantizers = call.step().quantizers;
  if (place >= quantizers.size() || !quantizers[place].is_multiplied) return {};
  const ByGroup& how = quantizers[place];
  return {how.quantizer, how.given == npos ? std::nullopt : call.maybe(how.given)};
}

kernel_ops::GroupQuantizer rows_quantizer_at(Call& call, size_t place, const Tensor& rows,
                                             const Tensor& splits, int64_t groups, bool later) {
  kernel_ops::GroupQuantizer how = quantizer_at(call, place);
  if (later || how.quantizer == nullptr || call.path() != Path::direct) {
    write_amaxes(call, place, rows, splits, groups);
  } else {
    collect_amaxes(call, place, rows, groups, how);
  }
  return how;
}

namespace {

/// Returns the write of the amaxes of contract `place`, or npos where they are not demanded.
size_t amaxes_write(const Call& call, size_t place) {
  const auto& quantizers = call.step().quantizers;
  const size_t write = place < quantizers.size() ? quantizers[place].amaxes : npos;
  return write != npos && call.wants(write) ? write : npos;
}

}  // namespace

void write_amaxes(Call& call, size_t place, const Tensor& rows, const Tensor& splits,
                  int64_t groups) {
  if (const size_t write = amaxes_write(call, place); write != npos)
    call.out(write, kernel_ops::grouped_amaxes(rows, splits, groups));
}

void collect_amaxes(Call& call, size_t place, const Tensor& like, int64_t groups,
                    kernel_ops::GroupQuantizer& how) {
  const size_t write = amaxes_write(call, place);
  if (write == npos) return;
  how.amaxes = at::zeros({groups}, like.options().dtype(at::kFloat));
  call.out(write, how.amaxes);
}

std::vector<Tensor> by_group(const Call& call, size_t list, bool is_packed) {
  const ListRange& range = call.read_list(list);
  if (is_packed) return call.in(range.first).unbind(0);
  std::vector<Tensor> tensors;
  for (size_t i = range.first; i < range.first + range.count; ++i) tensors.push_back(call.in(i));
  return tensors;
}

kernel_ops::GroupMatrices matrices_of(const Call& call, size_t list, bool is_packed,
                                      kernel_ops::GroupQuantizer quantizer) {
  kernel_ops::GroupMatrices made{by_group(call, list, is_packed), {}, {}, std::move(quantizer)};
  const ListRange& range = call.read_list(list);
  for (size_t i = range.first; !is_packed && i < range.first + range.count; ++i) {
    if (call.format(i) != Format::codes) break;
    const CodedMatrix codes = call.operand(i);
    made.quantizer = {codes.quantizer};
    made.scales.push_back(*codes.dequant_scale);
    if (codes.amax != nullptr) made.amaxes.push_back(*codes.amax);
  }
  return made;
}

kernel_ops::GroupBiases biases_of(const Call& call, size_t list, size_t scales,
                                  const GroupedLinearOptions& options, size_t x) {
  if (!options.bias) return {};
  kernel_ops::GroupBiases made{by_group(call, list, options.packed_bias), flat(call, scales)};
  if (made.scales) {
    const c10::SymInt rows = kernel_ops::rows_of(call.in(x));
    TORCH_CHECK_VALUE(made.scales->sym_numel() == rows, "grouped_linear: expected scales with ",
                      rows, " elements, one per row of x ", call.in(x).sym_sizes(), ", got shape ",
                      call.in(scales).sym_sizes(),
                      ". Pass a tensor of the shape of x without its last dimension.");
  }
  return made;
}

Targets::Targets(Call& call, bool is_packed, at::IntArrayRef sizes, const Tensor& like,
                 const std::vector<int64_t>& offsets, size_t list)
    : targets_(static_cast<size_t>(sizes[0])) {
  const auto fresh = [&](at::IntArrayRef own) {
    return call.frame().allocate(own, like.scalar_type(), like);
  };
  write_groups(
      call, is_packed, [&](size_t g) { return targets_[g] = fresh(sizes.slice(1)); },
      [&] {
        const Tensor whole = fresh(sizes);
        for (int64_t g = 0; g < sizes[0]; ++g)
          targets_[static_cast<size_t>(g)] = whole.select(0, g);
        return whole;
      },
      list);
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    if (offsets[g] == offsets[g + 1] && targets_[g].defined()) targets_[g].zero_();
}

bool wants_any(const Call& call, size_t list) {
  const ListRange& range = call.write_list(list);
  for (size_t i = range.first; i < range.first + range.count; ++i)
    if (call.wants(i)) return true;
  return false;
}

void check_devices(const Call& call, size_t list, size_t splits,
                   const GroupedLinearOptions& options) {
  TORCH_CHECK_VALUE(!call.in(splits).is_meta() || call.in(0).is_meta(),
                    "grouped_linear: expected splits with numbers, got a tensor on the device ",
                    "meta. Pass the number of rows of each group.");
  for (size_t each = list; each <= list + (options.bias ? 1 : 0); ++each) {
    const ListRange& range = call.read_list(each);
    for (size_t i = range.first; i < range.first + range.count; ++i) check_one_device(call, {0, i});
  }
}

void check_features(const Call& call, c10::SymIntArrayRef x, size_t list,
                    const GroupedLinearOptions& options) {
  const ListRange& range = call.read_list(list);
  std::vector<c10::SymDimVector> weights;  // the sizes of codes may differ
  for (size_t i = range.first; i < range.first + range.count; ++i)
    weights.push_back(call.sizes_of_numbers(i));
  if (options.packed_weight) {
    const auto groups = weights[0].empty() ? c10::SymInt(0) : weights[0].front();
    TORCH_CHECK_VALUE(groups == static_cast<int64_t>(options.num_groups),
                      "grouped_linear: expected a weight of shape [", options.num_groups,
                      ", out_features, in_features], got ", groups,
                      " groups. Pack one matrix per group.");
    weights = {c10::SymDimVector(weights[0].begin() + 1, weights[0].end())};
  }
  const c10::SymIntArrayRef first(weights[0]);
  for (const c10::SymDimVector& weight : weights)
    TORCH_CHECK_VALUE(weight.size() == 2 && c10::SymIntArrayRef(weight) == first,
                      "grouped_linear: expected weights of one shape [out_features, in_features], ",
                      "got ", first, " and ", c10::SymIntArrayRef(weight),
                      ". Pass matrices of one shape.");
  TORCH_CHECK_VALUE(!x.empty() && x.back() == first[1], "grouped_linear: expected x with ",
                    first[1], " features in its last dimension, as the weights ", first,
                    " have, got x of shape ", x, ". Build the op with these in_features, or ",
                    "reshape x.");
}

void check_main_grads(Call& call, const GroupedLinearOptions& options, const c10::SymInt& out,
                      const c10::SymInt& in, size_t first) {
  c10::SymDimVector sizes{out, in};
  if (options.packed_weight) sizes.insert(sizes.begin(), static_cast<int64_t>(options.num_groups));
  for (size_t i = first; i < first + main_grad_count(options); ++i) {
    const Tensor& main_grad = call.mutated(i);
    TORCH_CHECK_VALUE(main_grad.sym_sizes() == c10::SymIntArrayRef(sizes),
                      "grouped_linear: expected main_grad of the weight's shape ",
                      c10::SymIntArrayRef(sizes), ", got ", main_grad.sym_sizes(),
                      ". Allocate it like the weight.");
    TORCH_CHECK_VALUE(!main_grad.requires_grad() && main_grad.is_floating_point(),
                      "grouped_linear: expected main_grad to hold floating-point numbers without "
                      "a gradient of its own, got ",
                      main_grad.toString(), " with requires_grad=", main_grad.requires_grad(),
                      ". Allocate it with torch.zeros.");
    check_own_memory(call, "grouped_linear", "main_grad", main_grad);
  }
}

Tensor main_grad_of_group(const Call& call, const GroupedLinearOptions& options, size_t group,
                          size_t first) {
  if (!options.packed_weight) return call.mutated(first + group);
  return call.mutated(first).select(0, static_cast<int64_t>(group));
}

void accumulate_all(const Call& call, const GroupedLinearOptions& options, const Tensor& all,
                    size_t first) {
  for (size_t g = 0; g < options.num_groups; ++g) {
    const Tensor target = main_grad_of_group(call, options, g, first),
                 part = all.select(0, static_cast<int64_t>(g));
    options.overwrite_main_grad ? target.copy_(part) : target.add_(part);
  }
}

void finish_main_grads(Call& call, const GroupedLinearOptions& options, const Tensor& like,
                       size_t first, size_t list) {
  for (size_t i = first; call.path() == Path::direct && i < first + main_grad_count(options); ++i)
    call.mutated(i).unsafeGetTensorImpl()->bump_version();  // nothing else does so below autograd
  if (options.dummy == BasicLinearOptions::Dummy::none) return;
  const auto dummy = [&](const Tensor& main_grad) {
    const auto traits = like.options();
    return options.dummy == BasicLinearOptions::Dummy::zeros
               ? at::zeros_symint(main_grad.sym_sizes(), traits)
               : at::empty_symint(main_grad.sym_sizes(), traits);
  };
  write_groups(
      call, options.packed_weight, [&](size_t g) { return dummy(call.mutated(first + g)); },
      [&] { return dummy(call.mutated(first)); }, list);
}

void defer(const Call& call, const Deferred& deferred, size_t first) {
  check_can_leave(call, "grouped_linear");
  std::string lines =
      std::to_string(version_of(deferred.x)) + " " + std::to_string(version_of(deferred.splits));
  size_t place = first + 3;
  for (const kernel_ops::GroupQuantizer* how :
       {&deferred.quantizers.grad_y, &deferred.quantizers.x}) {
    if (how->given) leave(call, place, *how->given);
    ++place;
    lines += "\n" + (how->quantizer == nullptr ? std::string() : how->quantizer->text);
  }
  leave(call, first, deferred.grad_y);
  leave(call, first + 1, as_matrix(deferred.x), &deferred.x);
  leave(call, first + 2, deferred.splits, &deferred.splits);
  leave(call, place, lines);
}

Tensor left_grad_weights(at::TensorList left) {
  enum Left : size_t { kGradY, kX, kSplits, kGiven };
  std::istringstream lines(text_of(left));
  int64_t of_x = 0, of_splits = 0;
  lines >> of_x >> of_splits;
  std::string text;
  std::getline(lines, text);
  check_unchanged("x", left[kX], of_x);
  check_unchanged("the numbers of rows", left[kSplits], of_splits);
  kernel_ops::GradQuantizers quantizers;
  size_t place = kGiven;
  for (kernel_ops::GroupQuantizer* how : {&quantizers.grad_y, &quantizers.x}) {
    std::getline(lines, text);
    if (!text.empty()) how->quantizer = &quantizer(text);
    if (left[place].numel() != 0) how->given = left[place];
    ++place;
  }
  return kernel_ops::grouped_grad_weight(left[kGradY], left[kX], left[kSplits],
                                         left[kSplits].numel(), quantizers);
}

}  // namespace tandem::ops
