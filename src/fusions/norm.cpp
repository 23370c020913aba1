#include "fusions/norm.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/norm.h"
#include "kernel_ops/norm_quantize.h"
#include "kernel_ops/shapes.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

void rms_norm_quantize(Call& call) {
  enum Read { x, weight, given };
  enum Write { y, inv_rms, row, column, amax };
  const auto& norm = call.options<ops::NormOptions>(0);
  call.write_codes<kernel_ops::RmsNormQuantize>(
      [&] { return kernel_ops::sizes_of(call.in(x)); }, call.in(x), call.in(weight),
      call.maybe(given), norm.eps, norm.zero_centered_gamma, call.options<Quantizer>(1),
      std::array{call.wants(y), call.wants(row), call.wants(column), call.wants(amax)});
}

void layer_norm_quantize(Call& call) {
  enum Read { x, weight, bias, given };
  enum Write { y, mean, inv_std, row, column, amax };
  const auto& norm = call.options<ops::NormOptions>(0);
  call.write_codes<kernel_ops::LayerNormQuantize>(
      [&] { return kernel_ops::sizes_of(call.in(x)); }, call.in(x), call.in(weight), call.in(bias),
      call.maybe(given), norm.eps, norm.zero_centered_gamma, call.options<Quantizer>(1),
      std::array{call.wants(y), call.wants(row), call.wants(column), call.wants(amax)});
}

/// The terms of a sum before a norm, of the same sizes, and where it is written: where anything
/// reads it, or where it belongs into the caller's tensor.
struct Sum {
  at::Tensor x, extra, memory;
  bool is_wanted;
};
Sum sum_of(const Call& call, size_t x, size_t extra, size_t sum) {
  at::Tensor before = call.in(x);
  if (const auto sizes = before.sym_sizes(); call.in(extra).sym_sizes() != sizes)
    before = ops::broadcast_to(before, ops::sizes_of_sum(call, extra, sizes));
  at::Tensor added = added_by(call, extra, before.sym_sizes()),
             memory = memory_for_sum(call, added);
  return {std::move(before), std::move(added), std::move(memory),
          call.wants(sum) || !call.step().mutates.empty()};
}

/// kBias: a LayerNorm, which has one, and a mean.
template <bool kBias>
void add_norm(Call& call) {
  enum Read { x, extra, weight, bias };
  enum Write { sum, y, first_statistic };
  const auto& norm = call.options<ops::NormOptions>(1);
  const Sum terms = sum_of(call, x, extra, sum);
  auto results = call.run_into<kernel_ops::AddNormForward>(
      {terms.memory}, terms.x, terms.extra, call.in(weight),
      kBias ? call.maybe(bias) : std::nullopt, norm.eps, norm.zero_centered_gamma,
      std::array{terms.is_wanted});
  if (terms.is_wanted) write_sum(call, sum, std::move(results[0]), call.in(extra));
  if (call.wants(y)) call.out(y, std::move(results[1]));
  for (size_t statistic = kBias ? 2 : 3, write = first_statistic; statistic < 4;
       ++statistic, ++write)
    if (call.wants(write)) call.out(write, std::move(results[statistic]));
}

template <bool kBias>
void add_norm_quantize(Call& call) {
  enum Read { x, extra, weight, given, bias };
  enum Write { sum, y };
  constexpr size_t kCodes = kBias ? 4 : 3;
  const auto& norm = call.options<ops::NormOptions>(1);
  const Sum terms = sum_of(call, x, extra, sum);
  auto results = call.run_into<kernel_ops::AddNormQuantize>(
      {terms.memory}, terms.x, terms.extra, call.in(weight),
      kBias ? call.maybe(bias) : std::nullopt, call.maybe(given), norm.eps,
      norm.zero_centered_gamma, call.options<Quantizer>(2),
      std::array{terms.is_wanted, call.wants(y), call.wants(kCodes), call.wants(kCodes + 1),
                 call.wants(kCodes + 2)});
  if (terms.is_wanted) results[0] = written_sum(call, std::move(results[0]), call.in(extra));
  if (!kBias) std::swap(results[2], results[3]);  // the only statistic of RMSNorm
  call.hand_out_codes([&] { return kernel_ops::sizes_of(terms.x); }, std::move(results));
}

void rms_norm_backward_add(Call& call) {
  enum Read { grad_y, x, weight, inv_rms, grad_residual };
  call.write<kernel_ops::RmsNormBackward>(
      call.in(grad_y), call.in(x), call.in(weight), call.in(inv_rms), call.maybe(grad_residual),
      call.options<ops::NormOptions>().zero_centered_gamma, call.output_mask<3>());
}

void layer_norm_backward_add(Call& call) {
  enum Read { grad_y, x, weight, mean, inv_std, bias, grad_residual };
  call.write<kernel_ops::LayerNormBackward>(
      call.in(grad_y), call.in(x), call.in(weight), call.maybe(bias), call.in(mean),
      call.in(inv_std), call.maybe(grad_residual),
      call.options<ops::NormOptions>().zero_centered_gamma, call.output_mask<4>());
}

/// The parts that a pattern has before its quantizer, behind the gradient of a norm.
struct Parts {
  bool is_layer_norm, add, bias;
};

template <Parts kParts>
void norm_backward_quantize(Call& call) {
  enum Read { grad_y, x, weight, inv_norm, given, mean, bias };
  enum Write { grad_x, grad_weight, y, sums };
  enum Result { result_of_sums = 3, result_of_bias };
  constexpr size_t kResidual = kParts.is_layer_norm ? 7 : 5;
  constexpr size_t kGradBias = kParts.bias ? 4 : 3;
  constexpr size_t kCodes = kGradBias + (kParts.is_layer_norm ? 1 : 0);
  const auto maybe = [&](bool has, size_t read) { return has ? call.maybe(read) : std::nullopt; };
  const bool wants_sums = kParts.bias && call.wants(sums);
  auto results = call.run<kernel_ops::NormBackwardQuantize>(
      call.in(grad_y), call.in(x), call.in(weight), maybe(kParts.is_layer_norm, bias),
      maybe(kParts.is_layer_norm, mean), call.in(inv_norm), maybe(kParts.add, kResidual),
      call.maybe(given), call.options<ops::NormOptions>(0).zero_centered_gamma,
      wants_sums ? call.out_type(sums).dtype : call.in(x).scalar_type(),
      call.options<Quantizer>(kParts.bias ? 2 : 1),
      std::array{call.wants(grad_x), call.wants(grad_weight), call.wants(y), wants_sums,
                 kParts.is_layer_norm && call.wants(kGradBias), call.wants(kCodes),
                 call.wants(kCodes + 1), call.wants(kCodes + 2)});
  if (!kParts.bias) std::swap(results[result_of_sums], results[result_of_bias]);
  call.hand_out_codes([&] { return kernel_ops::sizes_of(call.in(x)); }, std::move(results));
}

Refusal refuse_same_gradient_twice(const Match& match) {
  if (exists(match[{1, kOtherRead}])) return std::nullopt;
  return "the sum has no other term";
}

Refusal refuse_add_norm(const Match& match) {
  if (auto refusal = refuse_in_place(match, 0)) return refusal;
  if (const at::ScalarType x = match.type({0, "x"}).dtype; !c10::isFloatingType(x))
    return std::string("x is ") + c10::toString(x) + ", which no norm takes";
  return refuse_foreign_extra(match, 0, {1, "weight"});
}

Refusal refuse_add_norm_quantize(const Match& match) {
  if (auto refusal = refuse_add_norm(match)) return refusal;
  return refuse_without_codes(match);
}

Refusal refuse_backward_add_quantize(const Match& match) {
  if (auto refusal = refuse_same_gradient_twice(match)) return refusal;
  if (auto refusal = refuse_mixed(match, {1, kOtherRead}, "the other gradient", {0, "grad_x"},
                                  "that of the norm"))
    return refusal;
  return refuse_without_codes(match);
}

template <Parts kParts>
Fusion backward_quantized(std::string name, std::string_view picture) {
  constexpr uint32_t kSum = kParts.add ? 1 : 0, kBias = kSum + 1,
                     kLast = kParts.bias ? kBias + 1 : kBias;
  constexpr std::string_view kMade = kParts.add ? "y" : "grad_x";
  Fusion fusion{.name = std::move(name),
                .pass = Pass::backward,
                .pattern = {kParts.is_layer_norm ? "layer_norm.backward" : "rms_norm.backward"},
                .run = {.reads = {{0, "grad_y"},
                                  {0, "x"},
                                  {0, "weight"},
                                  {0, kParts.is_layer_norm ? "inv_std" : "inv_rms"},
                                  {kLast, "given"}},
                        .writes = {{kSum, kMade}, {0, "grad_weight"}, {0, "y"}},
                        .run = norm_backward_quantize<kParts>},
                .refuse = kParts.add ? refuse_backward_add_quantize : refuse_without_codes,
                .picture = picture};
  if (kParts.is_layer_norm)
    fusion.run.reads.insert(fusion.run.reads.end(), {{0, "mean"}, {0, "bias"}});
  if (kParts.add) {
    fusion.pattern.emplace_back(StepKind::add);
    fusion.run.reads.push_back({1, kOtherRead});
  }
  if (kParts.bias) {
    fusion.pattern.emplace_back("bias.grad_bias");
    fusion.run.writes.push_back({kBias, "grad_bias"});
  }
  if (kParts.is_layer_norm) fusion.run.writes.push_back({0, "grad_bias"});
  fusion.pattern.push_back(PatternStep(StepKind::quantize).through(kMade, "x").behind(kSum));
  for (const char* codes : {"row_codes", "column_codes", "amax"})
    fusion.run.writes.push_back({kLast, codes});
  return fusion;
}

}  // namespace

const Fusion kRmsNormQuantize{
    .name = "rms_norm_quantize",
    .pattern = {"rms_norm", StepKind::quantize},
    .run =
        {.reads = {{0, "x"}, {0, "weight"}, {1, "given"}},
         .writes = {{0, "y"}, {0, "inv_rms"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
         .run = rms_norm_quantize},
    .refuse = refuse_without_codes,
    .picture = "x -> rms_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kLayerNormQuantize{
    .name = "layer_norm_quantize",
    .pattern = {"layer_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {0, "bias"}, {1, "given"}},
            .writes = {{0, "y"},
                       {0, "mean"},
                       {0, "inv_std"},
                       {1, "row_codes"},
                       {1, "column_codes"},
                       {1, "amax"}},
            .run = layer_norm_quantize},
    .refuse = refuse_without_codes,
    .picture = "x -> layer_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kAddRmsNorm{
    .name = "add_rms_norm",
    .pattern = {"add_extra_input|add_extra_input.in_place", "rms_norm"},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}},
            .writes = {{0, "y"}, {1, "y"}, {1, "inv_rms"}},
            .run = add_norm<false>,
            .mutates = {0}},
    .refuse = refuse_add_norm,
    .picture = "x + extra -> sum (if demanded) -> rms_norm -> y",
};

const Fusion kAddLayerNorm{
    .name = "add_layer_norm",
    .pattern = {"add_extra_input|add_extra_input.in_place", "layer_norm"},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {1, "bias"}},
            .writes = {{0, "y"}, {1, "y"}, {1, "mean"}, {1, "inv_std"}},
            .run = add_norm<true>,
            .mutates = {0}},
    .refuse = refuse_add_norm,
    .picture = "x + extra -> sum (if demanded) -> layer_norm -> y",
};

const Fusion kAddRmsNormQuantize{
    .name = "add_rms_norm_quantize",
    .pattern = {"add_extra_input|add_extra_input.in_place", "rms_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {2, "given"}},
            .writes = {{0, "y"},
                       {1, "y"},
                       {1, "inv_rms"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = add_norm_quantize<false>,
            .mutates = {0}},
    .refuse = refuse_add_norm_quantize,
    .picture =
        "x + extra -> sum (if demanded) -> rms_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kAddLayerNormQuantize{
    .name = "add_layer_norm_quantize",
    .pattern = {"add_extra_input|add_extra_input.in_place", "layer_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {2, "given"}, {1, "bias"}},
            .writes = {{0, "y"},
                       {1, "y"},
                       {1, "mean"},
                       {1, "inv_std"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = add_norm_quantize<true>,
            .mutates = {0}},
    .refuse = refuse_add_norm_quantize,
    .picture =
        "x + extra -> sum (if demanded) -> layer_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kRmsNormBackwardAdd{
    .name = "rms_norm_backward_add",
    .pass = Pass::backward,
    .pattern = {"rms_norm.backward", StepKind::add},
    .run = {.reads = {{0, "grad_y"}, {0, "x"}, {0, "weight"}, {0, "inv_rms"}, {1, kOtherRead}},
            .writes = {{1, "y"}, {0, "grad_weight"}, {0, "y"}},
            .run = rms_norm_backward_add},
    .refuse = refuse_same_gradient_twice,
    .picture = "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x",
};

const Fusion kLayerNormBackwardAdd{
    .name = "layer_norm_backward_add",
    .pass = Pass::backward,
    .pattern = {"layer_norm.backward", StepKind::add},
    .run = {.reads = {{0, "grad_y"},
                      {0, "x"},
                      {0, "weight"},
                      {0, "mean"},
                      {0, "inv_std"},
                      {0, "bias"},
                      {1, kOtherRead}},
            .writes = {{1, "y"}, {0, "grad_weight"}, {0, "grad_bias"}, {0, "y"}},
            .run = layer_norm_backward_add},
    .refuse = refuse_same_gradient_twice,
    .picture = "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x",
};

const Fusion kRmsNormBackwardQuantize = backward_quantized<Parts{false, false, false}>(
    "rms_norm_backward_quantize",
    "grad_y, x -> rms_norm.backward -> grad_x (if demanded) -> codes, scales, amax");
const Fusion kRmsNormBackwardBiasQuantize = backward_quantized<Parts{false, false, true}>(
    "rms_norm_backward_bias_quantize",
    "grad_y, x -> rms_norm.backward -> grad_x (if demanded) -> sum over rows -> grad_bias; grad_x "
    "-> codes, scales, amax");
const Fusion kRmsNormBackwardAddQuantize = backward_quantized<Parts{false, true, false}>(
    "rms_norm_backward_add_quantize",
    "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x (if demanded) -> codes, scales, "
    "amax");
const Fusion kRmsNormBackwardAddBiasQuantize = backward_quantized<Parts{false, true, true}>(
    "rms_norm_backward_add_bias_quantize",
    "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x (if demanded) -> sum over rows -> "
    "grad_bias; grad_x -> codes, scales, amax");
const Fusion kLayerNormBackwardQuantize = backward_quantized<Parts{true, false, false}>(
    "layer_norm_backward_quantize",
    "grad_y, x -> layer_norm.backward -> grad_x (if demanded) -> codes, scales, amax");
const Fusion kLayerNormBackwardBiasQuantize = backward_quantized<Parts{true, false, true}>(
    "layer_norm_backward_bias_quantize",
    "grad_y, x -> layer_norm.backward -> grad_x (if demanded) -> sum over rows -> grad_bias; "
    "grad_x -> codes, scales, amax");
const Fusion kLayerNormBackwardAddQuantize = backward_quantized<Parts{true, true, false}>(
    "layer_norm_backward_add_quantize",
    "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x (if demanded) -> codes, scales, "
    "amax");
const Fusion kLayerNormBackwardAddBiasQuantize = backward_quantized<Parts{true, true, true}>(
    "layer_norm_backward_add_bias_quantize",
    "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x (if demanded) -> sum over rows "
    "-> grad_bias; grad_x -> codes, scales, amax");

}  // namespace tandem::fusions
