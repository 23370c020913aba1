#include <array>
#include <optional>

#include "core/call.h"
#include "core/fusion.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation.h"
#include "ops/activation.h"
#include "ops/groups.h"

namespace tandem::fusions {

namespace {

using at::Tensor;
using kernel_ops::GroupBiases;
using kernel_ops::GroupMatrices;
using kernel_ops::rows_between;
using std::optional;

/// The kind of the unit between the products.
enum class Unit : uint8_t { activation, glu, scaled_activation, scaled_glu };
constexpr bool is_scaled(Unit unit) { return unit >= Unit::scaled_activation; }
constexpr bool is_gated(Unit unit) { return unit == Unit::glu || unit == Unit::scaled_glu; }

/// Reads of forward; in backward they follow grad_y and z. The lists are weights and biases of the
/// first product, then of the second.
enum ForwardRead { input, splits, factors, next_splits, next_factors, unit_scales };

/// Operands that one direction quantizes, as indices into the quantizers of a product's steps.
enum Quantized { rows_in, weight_in, gradient_of_weight, input_of_weight };
constexpr size_t kQuantizedInForward = 2, kQuantizedInBackward = 4;

/// One of the two products.
struct Layer {
  /// `quantized` is the number of operands that each product may quantize in this direction.
  Layer(Call& call, size_t number, size_t quantized, size_t input, size_t splits, size_t factors)
      : options(call.options<ops::GroupedLinearOptions>(2 * number)),
        splits(call.in(splits)),
        places(number * quantized),
        matrices(ops::matrices_of(call, 2 * number, options.packed_weight,
                                  ops::quantizer_at(call, places + weight_in))),
        biases(ops::biases_of(call, 2 * number + 1, factors, options, input)),
        rows_quantizer(ops::quantizer_at(call, places + rows_in)) {
    // A product that is not demanded quantizes nothing, and leaves zeros as amaxes.
    ops::collect_amaxes(call, places + rows_in, call.in(input), groups(), rows_quantizer);
    if (quantized != kQuantizedInBackward) return;
    of_weight = {ops::quantizer_at(call, places + gradient_of_weight),
                 ops::quantizer_at(call, places + input_of_weight)};
    ops::collect_amaxes(call, places + gradient_of_weight, call.in(input), groups(),
                        of_weight.grad_y);
  }

  int64_t groups() const { return static_cast<int64_t>(options.num_groups); }
  std::vector<int64_t> offsets(int64_t rows) const {
    return kernel_ops::group_offsets(splits, groups(), rows);
  }
  GroupBiases biases_of_rows(int64_t first, int64_t last) const {
    GroupBiases own{biases.biases};
    if (biases.scales) own.scales = rows_between(*biases.scales, first, last);
    return own;
  }

  const ops::GroupedLinearOptions& options;
  const Tensor& splits;
  /// The index of the first quantizer of this product.
  const size_t places;
  GroupMatrices matrices;
  GroupBiases biases;
  /// The quantizer of the rows that the weights multiply.
  kernel_ops::GroupQuantizer rows_quantizer;
  /// The quantizers of the operands of the weight gradients.
  kernel_ops::GradQuantizers of_weight;
};

/// The unit, with its operands beside z.
template <Unit kUnit>
struct Between {
  Between(Call& call, size_t rows_read, size_t scales_read)
      : call(call), function(call.options<ops::ActivationOptions>(1).function) {
    if constexpr (is_scaled(kUnit)) {
      kernel_ops::check_scales(call.in(rows_read), call.in(scales_read));
      scales = ops::flat(call, scales_read);
    }
  }

  using Forward = kernel_ops::ActivationForward;
  using Backward = kernel_ops::ActivationBackward;

  Tensor scales_between(int64_t first, int64_t last) const {
    return rows_between(*scales, first, last);
  }

  /// Returns unit(z + bias) where `wanted`, and writes the sum z + bias into z.
  Tensor forward(const Tensor& z, const optional<Tensor>& bias, const optional<Tensor>& own,
                 bool wanted) {
    if (!wanted && !bias) return {};
    if constexpr (is_scaled(kUnit)) {
      return call.run<kernel_ops::ScaledActivationForward>(
          {.x = z, .scales = *own, .activation = function, .is_gated = is_gated(kUnit)})[0];
    } else {
      auto results = call.run<Forward>({.x = z,
                                        .bias = bias,
                                        .activation = function,
                                        .is_gated = is_gated(kUnit),
                                        .output_mask = {bias.has_value(), wanted}},
                                       {z});
      if (bias && !results[Forward::z].is_same(z)) z.copy_(results[Forward::z]);
      return std::move(results[Forward::y]);
    }
  }

  struct Gradients {
    Tensor z, scales, bias, h;
  };
  struct Wanted {
    bool z, scales, bias, h;
  };
  /// Writes the gradient of z, and h, into the memory of `place` where that is defined.
  Gradients backward(const Tensor& grad_h, const Tensor& z, const optional<Tensor>& own,
                     const Wanted& wanted, const Gradients& place = {}) {
    Gradients made;
    if constexpr (is_scaled(kUnit)) {
      auto results = call.run<kernel_ops::ScaledActivationBackward>(
          {.grad_y = grad_h,
           .x = z,
           .scales = *own,
           .activation = function,
           .is_gated = is_gated(kUnit),
           .output_mask = {wanted.z, wanted.scales, wanted.h}},
          {place.z, {}, place.h});
      made = {std::move(results[0]), std::move(results[1]), {}, std::move(results[2])};
    } else {
      auto results = call.run<Backward>({.grad_y = grad_h,
                                         .z = z,
                                         .activation = function,
                                         .is_gated = is_gated(kUnit),
                                         .output_mask = {wanted.z, wanted.h, wanted.bias}},
                                        {place.z, place.h});
      made = {std::move(results[Backward::grad_z]),
              {},
              std::move(results[Backward::grad_bias]),
              std::move(results[Backward::y])};
    }
    for (Tensor Gradients::*part : {&Gradients::z, &Gradients::h})
      if ((place.*part).defined() && !(made.*part).is_same(place.*part))
        (place.*part).copy_(made.*part);
    return made;
  }

  Call& call;
  const std::string& function;
  optional<Tensor> scales;
};

/// Returns `y` with the leading dimensions of `like`.
Tensor unflat(const Tensor& y, const Tensor& like) {
  if (like.dim() == 2) return y;
  c10::SymDimVector sizes = kernel_ops::sizes_of(like);
  sizes.back() = y.sym_size(-1);
  return y.reshape_symint(sizes);
}

/// Multiplies all groups of one product by a kernel op or composite, as needed off the direct path.
Tensor product(Call& call, const Tensor& rows, const Layer& layer, const GroupBiases& biases,
               bool transposed) {
  call.took(call.path() == Path::composite ? kernel_ops::kReference : kernel_ops::kDispatcher);
  ops::write_amaxes(call, layer.places + rows_in, rows, layer.splits, layer.groups());
  return call.path() == Path::composite
             ? kernel_ops::composite::grouped_product(rows, layer.splits, layer.matrices.matrices,
                                                      biases.biases, biases.scales, transposed)
             : kernel_ops::grouped_product(rows, layer.splits, layer.matrices, biases, transposed,
                                           layer.rows_quantizer);
}

template <Unit kUnit>
void forward_by_product(Call& call, const Tensor& rows, const Layer& first, const Layer& second) {
  enum Write { z, y };
  Between<kUnit> unit(call, input, unit_scales);
  const Tensor sums = product(call, rows, first, first.biases, true);
  if (call.wants(z)) call.out(z, unflat(sums, call.in(input)));
  if (!call.wants(y)) return;
  const Tensor h = unit.forward(sums, std::nullopt, unit.scales, true);
  call.out(y, unflat(product(call, h, second, second.biases, true), call.in(input)));
}

template <Unit kUnit>
void forward(Call& call) {
  enum Write { z, y };
  const Layer first(call, 0, kQuantizedInForward, input, splits, factors),
      second(call, 1, kQuantizedInForward, input, next_splits, next_factors);
  ops::check_devices(call, 0, splits, first.options);
  ops::check_devices(call, 2, next_splits, second.options);
  ops::check_features(call, call.in(input).sym_sizes(), 0, first.options);
  const Tensor rows = ops::as_matrix(call.in(input));
  if (call.path() != Path::direct) return forward_by_product<kUnit>(call, rows, first, second);
  const auto offsets = first.offsets(rows.size(0));
  if (offsets != second.offsets(rows.size(0)))
    return forward_by_product<kUnit>(call, rows, first, second);
  Between<kUnit> unit(call, input, unit_scales);
  const c10::SymInt between[] = {rows.size(0),
                                 first.matrices.matrices[0].size(0) / (is_gated(kUnit) ? 2 : 1)};
  ops::check_features(call, between, 2, second.options);
  const auto fresh = [&](const Layer& layer) {
    const int64_t sizes[] = {rows.size(0), layer.matrices.matrices[0].size(0)};
    return call.frame().allocate(sizes, rows.scalar_type(), rows);
  };
  const Tensor sums = call.wants(z) ? fresh(first) : Tensor(),
               result = call.wants(y) ? fresh(second) : Tensor();
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    const int64_t begin = offsets[g], end = offsets[g + 1];
    // The unit adds a bias that all rows share, except in 16 bits, where the unit would read a
    // rounded product.
    const bool adds = !is_scaled(kUnit) && !first.biases.biases.empty() && !first.biases.scales &&
                      !kernel_ops::is_narrow(rows.scalar_type());
    const optional<Tensor> bias = adds ? optional(first.biases.biases[g]) : std::nullopt;
    const int64_t sizes[] = {end - begin, first.matrices.matrices[g].size(0)};
    const Tensor z_g = sums.defined() ? rows_between(sums, begin, end)
                                      : call.frame().allocate(sizes, rows.scalar_type(), rows);
    call.took(kernel_ops::product_of_group(rows_between(rows, begin, end), first.matrices,
                                           adds ? GroupBiases() : first.biases_of_rows(begin, end),
                                           g, true, first.rows_quantizer, z_g));
    optional<Tensor> own;
    if (unit.scales) own = unit.scales_between(begin, end);
    const Tensor h = unit.forward(z_g, bias, own, call.wants(y));
    if (!call.wants(y)) return;
    call.took(kernel_ops::product_of_group(h, second.matrices, second.biases_of_rows(begin, end), g,
                                           true, second.rows_quantizer,
                                           rows_between(result, begin, end)));
  });
  for (const Tensor& each : {sums, result})
    if (each.defined() && offsets.back() != rows.size(0))
      rows_between(each, offsets.back(), rows.size(0)).zero_();
  if (call.wants(z)) call.out(z, unflat(sums, call.in(input)));
  if (call.wants(y)) call.out(y, unflat(result, call.in(input)));
}

/// Backward reads grad_y, z, then the reads of forward.
constexpr size_t kBehind = 2;
/// Writes of backward before the lists. The lists are gradients of the first product's weights and
/// biases, then of the second product's.
enum Gradient { grad_x, grad_factors, grad_next_factors, grad_unit_scales };
enum List { weight, bias, next_weight, next_bias };

/// The destination of the gradients of a product's weights.
enum class Goes : uint8_t { nowhere, to_its_writes, into_main_grad, to_the_caller };
Goes way_of(const Call& call, const Layer& layer, size_t number, size_t list) {
  const bool is_returned = !layer.options.accumulate_into_main_grad && !layer.options.delay_wgrad;
  if (is_returned) return ops::wants_any(call, list) ? Goes::to_its_writes : Goes::nowhere;
  if (call.mutated_for(number).count == 0) return Goes::nowhere;
  return layer.options.delay_wgrad ? Goes::to_the_caller : Goes::into_main_grad;
}

/// The gradients that the step writes.
template <Unit kUnit>
struct Written {
  Written(const Call& call, const Layer& first, const Layer& second)
      : x(call.wants(grad_x)),
        factors(call.wants(grad_factors)),
        next_factors(call.wants(grad_next_factors)),
        unit_scales(is_scaled(kUnit) && call.wants(grad_unit_scales)),
        bias(ops::wants_any(call, List::bias)),
        next_bias(ops::wants_any(call, List::next_bias)),
        weight(way_of(call, first, 0, List::weight)),
        next_weight(way_of(call, second, 1, List::next_weight)) {}
  /// Whether the gradient of z is needed.
  bool z() const { return x || factors || weight != Goes::nowhere || bias; }
  /// Whether a result of the unit's backward is needed. Forward of the unit suffices for h.
  bool unit() const { return z() || unit_scales; }
  bool h() const { return next_weight != Goes::nowhere; }

  bool x, factors, next_factors, unit_scales, bias, next_bias;
  Goes weight, next_weight;
};

void write_whole(Call& call, size_t list, bool is_packed, const Tensor& all) {
  const auto parts = all.unbind(0);
  ops::write_groups(
      call, is_packed, [&](size_t g) { return parts[g].clone(); }, [&] { return all; }, list);
}

/// Writes the gradients of the weights of one product to their destination.
class GradWeights {
 public:
  GradWeights(Call& call, const Layer& layer, size_t number, size_t list, Goes goes)
      : call_(call),
        layer_(layer),
        list_(list),
        goes_(goes),
        first_(goes == Goes::into_main_grad || goes == Goes::to_the_caller
                   ? call.mutated_for(number).first
                   : 0) {}

  bool is_deferred() const { return goes_ == Goes::to_the_caller; }

  /// Writes the gradients of all groups from the gradient of the product's result, `of_sums`, and
  /// the product's operand. `is_callers` says that `of_sums` is a tensor from outside the step.
  void write_all(const Tensor& of_sums, const Tensor& input, bool is_callers) {
    if (goes_ == Goes::nowhere) return;
    if (is_deferred()) return defer(of_sums, input, is_callers);
    write_amaxes(of_sums);
    const Tensor all = kernel_ops::grouped_grad_weight(of_sums, input, layer_.splits,
                                                       layer_.groups(), layer_.of_weight);
    if (goes_ == Goes::to_its_writes)
      return write_whole(call_, list_, layer_.options.packed_weight, all);
    check(of_sums.sym_size(1), input.sym_size(1));
    ops::accumulate_all(call_, layer_.options, all, first_);
    ops::finish_main_grads(call_, layer_.options, input, first_, list_);
  }

  /// Allocates the gradients that `write_group` writes; call it first.
  void start(int64_t out, int64_t in, const Tensor& like, const std::vector<int64_t>& offsets) {
    if (goes_ == Goes::into_main_grad) check(out, in);
    if (goes_ != Goes::to_its_writes) return;
    const int64_t sizes[] = {layer_.groups(), out, in};
    targets_.emplace(call_, layer_.options.packed_weight, sizes, like, offsets, list_);
  }
  void write_group(size_t g, const Tensor& of_sums, const Tensor& input) const {
    const bool is_added = goes_ == Goes::into_main_grad;
    if (!is_added && !targets_) return;
    const Tensor target =
        is_added ? ops::main_grad_of_group(call_, layer_.options, g, first_) : (*targets_)[g];
    if (!target.defined()) return;
    call_.took(kernel_ops::grad_weight_of_group(of_sums, input, layer_.of_weight, g, target,
                                                is_added && !layer_.options.overwrite_main_grad));
  }
  /// Completes the gradients after the last group.
  void finish(const Tensor& like, const std::vector<int64_t>& offsets) {
    if (goes_ != Goes::into_main_grad) return;
    for (size_t g = 0; layer_.options.overwrite_main_grad && g + 1 < offsets.size(); ++g)
      if (offsets[g] == offsets[g + 1])
        ops::main_grad_of_group(call_, layer_.options, g, first_).zero_();
    ops::finish_main_grads(call_, layer_.options, like, first_, list_);
  }
  /// Stores the operands of delayed gradients.
  void defer(const Tensor& of_sums, const Tensor& input, bool is_callers) const {
    if (!is_deferred()) return;
    write_amaxes(of_sums);
    ops::defer(call_,
               {is_callers ? of_sums.clone() : of_sums, input, layer_.splits, layer_.of_weight},
               first_);
  }

 private:
  /// Measures the amaxes of all groups where no product quantizes the rows.
  void write_amaxes(const Tensor& of_sums) const {
    ops::write_amaxes(call_, layer_.places + gradient_of_weight, of_sums, layer_.splits,
                      layer_.groups());
  }
  void check(const c10::SymInt& out, const c10::SymInt& in) const {
    ops::check_main_grads(call_, layer_.options, out, in, first_);
  }

  Call& call_;
  const Layer& layer_;
  const size_t list_;
  const Goes goes_;
  const size_t first_;
  std::optional<ops::Targets> targets_;
};

template <Unit kUnit>
void backward_by_product(Call& call, const Tensor& gradient, const Tensor& z, const Tensor& rows,
                         const Layer& first, const Layer& second) {
  const Written<kUnit> wanted(call, first, second);
  Between<kUnit> unit(call, kBehind + input, kBehind + unit_scales);
  const auto shaped = [&](const Tensor& all, size_t read) {
    return all.reshape_symint(call.in(read).sym_sizes());
  };
  typename Between<kUnit>::Gradients made;
  if (wanted.unit()) {
    made = unit.backward(product(call, gradient, second, {}, false), z, unit.scales,
                         {wanted.z(), wanted.unit_scales, false, wanted.h()});
  } else if (wanted.h()) {
    made.h = unit.forward(z, std::nullopt, unit.scales, true);
  }
  if (wanted.x)
    call.out(grad_x, unflat(product(call, made.z, first, {}, false), call.in(kBehind + input)));
  if (wanted.unit_scales) call.out(grad_unit_scales, shaped(made.scales, kBehind + unit_scales));
  const auto bias_of = [&](const Layer& layer, const Tensor& of_sums, size_t list, bool is_wanted) {
    if (is_wanted)
      write_whole(call, list, layer.options.packed_bias,
                  kernel_ops::grouped_grad_bias(of_sums, layer.splits, layer.biases.scales,
                                                layer.groups()));
  };
  GradWeights(call, first, 0, List::weight, wanted.weight).write_all(made.z, rows, false);
  GradWeights(call, second, 1, List::next_weight, wanted.next_weight)
      .write_all(gradient, made.h, true);
  bias_of(first, made.z, List::bias, wanted.bias);
  bias_of(second, gradient, List::next_bias, wanted.next_bias);
  if (wanted.factors)
    call.out(grad_factors,
             shaped(kernel_ops::grouped_grad_scales(made.z, first.splits, first.biases.biases),
                    kBehind + factors));
  if (wanted.next_factors)
    call.out(grad_next_factors,
             shaped(kernel_ops::grouped_grad_scales(gradient, second.splits, second.biases.biases),
                    kBehind + next_factors));
}

/// Allocates a result with one number per row, which is written group by group; rows after the last
/// group get zeros.
Tensor per_row(Call& call, size_t write, bool is_wanted, size_t read, const Tensor& like,
               int64_t used) {
  if (!is_wanted) return {};
  const Tensor made = call.frame().allocate(call.in(read).sizes(), like.scalar_type(), like);
  call.out(write, made);
  const Tensor all = made.view(-1);
  rows_between(all, used, all.size(0)).zero_();
  return all;
}

template <Unit kUnit>
void backward(Call& call) {
  enum BackwardRead { grad_y, sums };
  const Layer first(call, 0, kQuantizedInBackward, kBehind + input, kBehind + splits,
                    kBehind + factors),
      second(call, 1, kQuantizedInBackward, kBehind + input, kBehind + next_splits,
             kBehind + next_factors);
  const Tensor gradient = ops::as_matrix(call.in(grad_y)), z = ops::as_matrix(call.in(sums)),
               rows = ops::as_matrix(call.in(kBehind + input));
  if (call.path() != Path::direct)
    return backward_by_product<kUnit>(call, gradient, z, rows, first, second);
  const auto offsets = first.offsets(rows.size(0));
  if (offsets != second.offsets(rows.size(0)))
    return backward_by_product<kUnit>(call, gradient, z, rows, first, second);
  const Written<kUnit> wanted(call, first, second);
  Between<kUnit> unit(call, kBehind + input, kBehind + unit_scales);
  const int64_t wide = z.size(1), out = gradient.size(1), in = rows.size(1),
                inner = is_gated(kUnit) ? wide / 2 : wide, used = offsets.back();
  const auto all_rows = [&](bool is_wanted, int64_t features) {
    if (!is_wanted) return Tensor();
    const int64_t sizes[] = {rows.size(0), features};
    Tensor all = call.frame().allocate(sizes, rows.scalar_type(), rows);
    if (used != rows.size(0)) rows_between(all, used, rows.size(0)).zero_();
    return all;
  };
  GradWeights weights(call, first, 0, List::weight, wanted.weight),
      next_weights(call, second, 1, List::next_weight, wanted.next_weight);
  // Delayed gradients need the operands of all groups.
  const Tensor whole_z = all_rows(weights.is_deferred(), wide),
               whole_h = all_rows(next_weights.is_deferred(), inner);
  weights.start(wide, in, rows, offsets);
  next_weights.start(out, inner, rows, offsets);
  const ops::Targets biases(call, first.options.packed_bias, {first.groups(), wide}, rows, offsets,
                            List::bias),
      next_biases(call, second.options.packed_bias, {second.groups(), out}, rows, offsets,
                  List::next_bias);
  const Tensor of_factors =
                   per_row(call, grad_factors, wanted.factors, kBehind + factors, rows, used),
               of_next = per_row(call, grad_next_factors, wanted.next_factors,
                                 kBehind + next_factors, rows, used),
               of_scales = per_row(call, grad_unit_scales, wanted.unit_scales,
                                   kBehind + unit_scales, rows, used);
  const Tensor of_x = all_rows(wanted.x, in);
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    const int64_t begin = offsets[g], end = offsets[g + 1];
    const auto group = [&](const Tensor& all) {
      return all.defined() ? rows_between(all, begin, end) : Tensor();
    };
    const Tensor gradient_g = group(gradient), x_g = group(rows);
    typename Between<kUnit>::Gradients made;
    const GroupBiases own = first.biases_of_rows(begin, end);
    const bool sums_bias = !is_scaled(kUnit) && wanted.bias && !own.scales;
    optional<Tensor> scales;
    if (unit.scales) scales = unit.scales_between(begin, end);
    if (wanted.unit()) {
      const int64_t shape[] = {end - begin, inner};
      const Tensor grad_h = call.frame().allocate(shape, rows.scalar_type(), rows);
      call.took(kernel_ops::product_of_group(gradient_g, second.matrices, {}, g, false,
                                             second.rows_quantizer, grad_h));
      made = unit.backward(grad_h, group(z), scales,
                           {wanted.z(), wanted.unit_scales, sums_bias, wanted.h()},
                           {group(whole_z), {}, {}, group(whole_h)});
    } else if (wanted.h()) {
      made.h = unit.forward(group(z), std::nullopt, scales, true);
      if (whole_h.defined()) group(whole_h).copy_(made.h);
    }
    if (wanted.unit_scales) group(of_scales).copy_(made.scales);
    next_weights.write_group(g, gradient_g, made.h);
    if (const Tensor target = next_biases[g]; target.defined())
      call.took(kernel_ops::grad_bias_of_group(gradient_g, second.biases_of_rows(begin, end).scales,
                                               target));
    if (wanted.next_factors)
      call.took(
          kernel_ops::grad_scales_of_group(gradient_g, second.biases.biases[g], group(of_next)));
    if (wanted.x)
      call.took(kernel_ops::product_of_group(made.z, first.matrices, {}, g, false,
                                             first.rows_quantizer, group(of_x)));
    weights.write_group(g, made.z, x_g);
    if (const Tensor target = biases[g]; target.defined()) {
      if (sums_bias) {
        target.copy_(made.bias);
      } else {
        call.took(kernel_ops::grad_bias_of_group(made.z, own.scales, target));
      }
    }
    if (wanted.factors)
      call.took(
          kernel_ops::grad_scales_of_group(made.z, first.biases.biases[g], group(of_factors)));
  });
  weights.finish(rows, offsets);
  next_weights.finish(rows, offsets);
  weights.defer(whole_z, rows, /*is_callers=*/false);
  next_weights.defer(gradient, whole_h, /*is_callers=*/true);
  if (wanted.x) call.out(grad_x, unflat(of_x, call.in(kBehind + input)));
}

Refusal refuse(const Match& match) {
  for (const uint32_t member : {0u, 2u}) {
    const Step& step = *match.steps[member];
    const auto& options = *static_cast<const ops::GroupedLinearOptions*>(step.options[0].get());
    if (options.writes_output || options.writes_grad_input)
      return "a tensor of the caller is written";
  }
  for (const uint32_t member : {0u, 2u})
    for (const ByGroup& how : match.steps[member]->quantizers)
      if (how.amaxes != npos && !how.is_multiplied)
        return "the amaxes of numbers that no product quantizes are kept (calibrating)";
  const auto groups = [&](uint32_t member) {
    return static_cast<const ops::GroupedLinearOptions*>(match.steps[member]->options[0].get())
        ->num_groups;
  };
  if (groups(0) != groups(2))
    return "the products have " + std::to_string(groups(0)) + " and " + std::to_string(groups(2)) +
           " groups";
  if (match.type({0, "x"}).dtype != match.type({2, "y"}).dtype)
    return "the products have different dtypes";
  return std::nullopt;
}

template <Unit kUnit>
Fusion grouped_mlp(std::string name, const PatternStep& unit, Pass pass) {
  if (pass == Pass::forward) name += "_forward";
  Fusion fusion{.name = std::move(name), .pass = pass};
  fusion.pattern = {"grouped_linear", unit, "grouped_linear"};
  std::vector<MemberOperand> reads{
      {0, "x"}, {0, "splits"}, {0, "scales"}, {2, "splits"}, {2, "scales"}};
  if (is_scaled(kUnit)) reads.push_back({1, "scales"});
  for (const uint32_t member : {0u, 2u})
    for (const std::string_view list : {"weight[]", "bias[]"}) reads.push_back({member, list});
  fusion.run = {.reads = reads,
                .writes = {{0, "y"}, {2, "y"}},
                .run = forward<kUnit>,
                .quantizes = {{0, "x"}, {0, "weight[]"}, {2, "x"}, {2, "weight[]"}}};
  fusion.refuse = refuse;
  fusion.picture =
      "x_g, weight_g -> product -> + bias_g -> z_g (if demanded) -> unit -> h_g, weight'_g -> "
      "product -> + bias'_g -> y_g, group by group";
  if (pass != Pass::joint) return fusion;
  fusion.backward.reads = {{2, "grad_y"}, {0, "y"}};
  for (MemberOperand read : reads) {
    if (read.name == "weight[]") read.step = "grad_x";  // column codes under a recipe
    fusion.backward.reads.push_back(read);
  }
  fusion.backward.writes = {{0, "grad_x"}, {0, "grad_scales"}, {2, "grad_scales"}};
  if (is_scaled(kUnit)) fusion.backward.writes.push_back({1, "grad_scales"});
  for (const uint32_t member : {0u, 2u})
    for (const std::string_view list : {"grad_weight[]", "grad_bias[]"})
      fusion.backward.writes.push_back({member, list});
  fusion.backward.run = backward<kUnit>;
  fusion.backward.mutates = {0, 2};
  constexpr std::string_view kGradWeight = "grad_weight|accumulate|defer";
  for (const uint32_t member : {0u, 2u})
    for (const MemberOperand& operand :
         {MemberOperand{member, "grad_y", "grad_x"}, MemberOperand{member, "weight[]", "grad_x"},
          MemberOperand{member, "grad_y", kGradWeight}, MemberOperand{member, "x", kGradWeight}})
      fusion.backward.quantizes.push_back(operand);
  return fusion;
}

Fusion with_activation(Pass pass) {
  return grouped_mlp<Unit::activation>("grouped_mlp_activation", PatternStep::any_of("activation"),
                                       pass);
}
Fusion with_glu(Pass pass) {
  return grouped_mlp<Unit::glu>("grouped_mlp_glu", PatternStep::any_of("glu"), pass);
}
Fusion with_scaled_activation(Pass pass) {
  return grouped_mlp<Unit::scaled_activation>("grouped_mlp_scaled_activation", "scaled_srelu",
                                              pass);
}
Fusion with_scaled_glu(Pass pass) {
  return grouped_mlp<Unit::scaled_glu>("grouped_mlp_scaled_glu",
                                       "scaled_swiglu|scaled_situglu|scaled_clamped_qgeglu", pass);
}

}  // namespace

extern const Fusion kGroupedMlpActivation = with_activation(Pass::joint);
extern const Fusion kGroupedMlpGlu = with_glu(Pass::joint);
extern const Fusion kGroupedMlpScaledActivation = with_scaled_activation(Pass::joint);
extern const Fusion kGroupedMlpScaledGlu = with_scaled_glu(Pass::joint);
extern const Fusion kGroupedMlpActivationForward = with_activation(Pass::forward);
extern const Fusion kGroupedMlpGluForward = with_glu(Pass::forward);
extern const Fusion kGroupedMlpScaledActivationForward = with_scaled_activation(Pass::forward);
extern const Fusion kGroupedMlpScaledGluForward = with_scaled_glu(Pass::forward);

}  // namespace tandem::fusions
