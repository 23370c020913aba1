// The losses of a model with many classes.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>

#include <array>

#include "core/call.h"
#include "core/op_def.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/loss/linear_cross_entropy.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

using Loss = kernel_ops::LinearCrossEntropy;
using LossOptions = LinearCrossEntropyOptions;

const LossOptions& loss_options(const void* options) {
  return *static_cast<const LossOptions*>(options);
}
constexpr std::array<std::string_view, 3> kReductions{"mean", "sum", "none"};

/// Returns the tensor of a list that has at most one.
std::optional<at::Tensor> only(const Call& call, size_t list) {
  const ListRange& range = call.read_list(list);
  return range.count == 0 ? std::nullopt : std::optional(call.in(range.first));
}

/// The arguments of the kernel op. The reads from `x` on are x, targets and, if the op has one, the
/// weight; the last lists of reads are biases, if the op has a weight, and class weights.
template <bool kHasWeight>
Loss::Args loss_arguments(const Call& call, size_t x, std::array<bool, 6> wanted) {
  const auto& options = call.options<LossOptions>();
  return {.x = call.in(x),
          .weight = kHasWeight ? std::optional(call.in(x + 2)) : std::nullopt,
          .targets = call.in(x + 1),
          .bias = kHasWeight ? only(call, 0) : std::nullopt,
          .class_weight = only(call, kHasWeight ? 1 : 0),
          .reduction = kReductions[static_cast<size_t>(options.reduction)],
          .ignore_index = options.ignore_index,
          .label_smoothing = options.label_smoothing,
          .soft_cap = options.soft_cap,
          .z_loss = options.z_loss,
          .group = options.group,
          .group_size = options.group_size,
          .rank = options.rank,
          .output_mask = wanted};
}

void loss_forward(Call& call) {
  call.write<Loss>(loss_arguments<true>(call, 0, call.output_mask<6>()));
}
void loss_of_logits_forward(Call& call) {
  const auto [y, denominator, grad_x] = call.output_mask<3>();
  call.write<Loss>(loss_arguments<false>(call, 0, {y, denominator, grad_x, false, false, false}));
}

/// Each gradient is the gradient that forward computed times one factor, or times one for each row.
/// Rows that are ignored have none, even where a factor is infinite or NaN, as that of a mean over
/// no rows is.
template <bool kByRow>
void loss_backward(Call& call) {
  enum Read { grad_y, denominator, targets, unit };
  const auto& options = call.options<LossOptions>();
  at::Tensor factor = call.in(grad_y);
  const at::Tensor& gradient = call.in(unit);
  const at::Tensor ignored = call.in(targets) == options.ignore_index;
  if (options.reduction == LossOptions::Reduction::mean) factor = factor / call.in(denominator);
  factor = at::where(kByRow ? ignored : ignored.all(), 0, factor);
  if (kByRow) {
    c10::SymDimVector by_row(gradient.sym_sizes().begin(), gradient.sym_sizes().end());
    by_row.back() = 1;
    factor = factor.reshape_symint(by_row);
  }
  const at::ScalarType dtype = call.out_type(0).dtype;
  if (call.path() != Path::direct || gradient.scalar_type() != dtype)
    return call.out(0, (gradient * factor).to(dtype));
  // Without a second one of the size of the weight, unless backward may come once more.
  const bool is_own =
      gradient.use_count() == 1 && gradient.storage().use_count() == 1 && gradient.is_contiguous();
  at::Tensor scaled =
      is_own ? gradient : kernel_ops::empty_beside(gradient, gradient.sizes(), dtype);
  at::mul_out(scaled, gradient, factor);
  call.out(0, std::move(scaled));
}

/// With a loss for each row, the gradient of the weight is no multiple of one that forward could
/// compute, so that the logits are recomputed.
void loss_backward_by_row(Call& call) {
  enum Read { grad_y, x };
  enum Write { grad_x, grad_weight };
  const ListRange& biases = call.write_list(0);
  const bool wants_bias = biases.count != 0 && call.wants(biases.first);
  Loss::Args args = loss_arguments<true>(
      call, x, {false, false, call.wants(grad_x), call.wants(grad_weight), wants_bias, false});
  args.factors = call.in(grad_y);
  auto results = call.run<Loss>(args);
  if (call.wants(grad_x)) call.out(grad_x, std::move(results[Loss::grad_x]));
  if (call.wants(grad_weight)) call.out(grad_weight, std::move(results[Loss::grad_weight]));
  if (wants_bias) call.out(biases.first, std::move(results[Loss::grad_bias]));
}

bool is_by_row(const void* options) {
  return loss_options(options).reduction == LossOptions::Reduction::none;
}
bool is_reduced(const void* options) { return !is_by_row(options); }
bool is_reduced_with_bias(const void* options) {
  return is_reduced(options) && loss_options(options).bias;
}
size_t loss_lists(const void* options, std::string_view operand) {
  const LossOptions& of = loss_options(options);
  return (operand == "bias[]" ? of.bias : of.class_weight) ? 1 : 0;
}

Signature loss_signature(std::vector<Option<LossOptions>> options) {
  const std::vector<Option<LossOptions>> of_all = {
      {"class_weight", &LossOptions::class_weight,
       "the losses of a class are multiplied by its number among class_weight"},
      {"reduction", &LossOptions::reduction, one_of({"mean", "sum", "none"}),
       "what becomes of the losses of rows; the mean is over what they weigh"},
      {"ignore_index", &LossOptions::ignore_index, between(-2147483648.0, 2147483647.0),
       "rows with this target have loss 0 and no gradient"},
      {"label_smoothing", &LossOptions::label_smoothing, between(0, 1),
       "the share of a target that is spread over all classes"},
      {"soft_cap", &LossOptions::soft_cap, at_least(0),
       "logits become soft_cap tanh(logits / soft_cap); 0: they stay"},
      {"z_loss", &LossOptions::z_loss, at_least(0),
       "the factor of logsumexp(logits)^2 in the loss of a row"},
      {"group", &LossOptions::group,
       "the process group whose ranks share the classes, as torch.distributed names it"},
      {"group_size", &LossOptions::group_size, between(1, 1 << 20),
       "the ranks in it; 1: the classes are not shared"},
      {"rank", &LossOptions::rank, between(0, 1 << 20), "this process's place among them"}};
  options.insert(options.end(), of_all.begin(), of_all.end());
  return {LossOptions{}, options};
}

OpDef loss_definition(std::string_view name, const char* formula, Names extra_outputs) {
  return {
      .name = name,
      .formula = formula,
      .family = "linear_cross_entropy",
      .signature = loss_signature({{"bias", &LossOptions::bias, "there is a bias"}}),
      .sizes = {{"in_features", "size of the last dimension of x"},
                {"num_classes", "number of classes"}},
      .inputs = {"x", "targets"},
      .indices = {"targets"},
      .params = {{"weight", {"num_classes", "in_features"}, ParamDef::Init::kaiming_uniform},
                 {"bias[]", {"num_classes"}},
                 {"class_weight[]", {"num_classes"}, ParamDef::Init::ones}},
      .fixed_params = 1,
      .results = {{"y", ResultDef::statistic},
                  {"denominator", ResultDef::statistic},
                  {"unit_grad_x", ResultDef::large},
                  {"unit_grad_weight", ResultDef::large},
                  {"unit_grad_bias", ResultDef::large},
                  {"predictions", ResultDef::computed, at::kLong}},
      .extra_outputs = std::move(extra_outputs),
      .dtype = DtypeRule::weight,
      .forward = {{.name = "forward",
                   .reads = {"x", "targets", "weight", "bias[]", "class_weight[]"},
                   .writes = {"y", "denominator", "unit_grad_x", "unit_grad_weight",
                              "unit_grad_bias", "predictions"},
                   .run = loss_forward}},
      .backward = {{.name = "grad_x",
                    .reads = {"grad_y", "denominator", "targets", "unit_grad_x"},
                    .writes = {"grad_x"},
                    .run = loss_backward</*kByRow=*/true>,
                    .applies = is_reduced},
                   {.name = "grad_weight",
                    .reads = {"grad_y", "denominator", "targets", "unit_grad_weight"},
                    .writes = {"grad_weight"},
                    .run = loss_backward</*kByRow=*/false>,
                    .applies = is_reduced},
                   {.name = "grad_bias",
                    .reads = {"grad_y", "denominator", "targets", "unit_grad_bias"},
                    .writes = {"grad_bias[]"},
                    .run = loss_backward</*kByRow=*/false>,
                    .applies = is_reduced_with_bias},
                   {.name = "backward",
                    .reads = {"grad_y", "x", "targets", "weight", "bias[]", "class_weight[]"},
                    .writes = {"grad_x", "grad_weight", "grad_bias[]"},
                    .run = loss_backward_by_row,
                    .applies = is_by_row}},
      .context = {"x", "targets", "denominator", "unit_grad_x", "unit_grad_weight",
                  "unit_grad_bias"},
      .list_length = loss_lists,
  };
}

OpDef loss_of_logits_definition() {
  return {
      .name = "cross_entropy",
      .formula = "y = mean of cross_entropy(x, targets)",
      .signature = loss_signature({}),
      .sizes = {{"num_classes", "number of classes"}},
      .inputs = {"x", "targets"},
      .indices = {"targets"},
      .params = {{"class_weight[]", {"num_classes"}, ParamDef::Init::ones}},
      .fixed_params = 1,
      .results = {{"y", ResultDef::statistic},
                  {"denominator", ResultDef::statistic},
                  {"unit_grad_x", ResultDef::large}},
      // torch.autocast leaves logits as they are too: torch's cross entropy computes in float32.
      .dtype = DtypeRule::promote,
      .forward = {{.name = "forward",
                   .reads = {"x", "targets", "class_weight[]"},
                   .writes = {"y", "denominator", "unit_grad_x"},
                   .run = loss_of_logits_forward}},
      // Backward does not read x, so that logits may be overwritten once their loss is computed.
      .backward = {{.name = "backward",
                    .reads = {"grad_y", "denominator", "targets", "unit_grad_x"},
                    .writes = {"grad_x"},
                    .run = loss_backward</*kByRow=*/true>}},
      .context = {"targets", "denominator", "unit_grad_x"},
      .list_length = loss_lists,
  };
}

}  // namespace

/// The cross entropy of logits x, which other code may read and overwrite. Forward also computes
/// the gradient of x, which backward multiplies by the gradient of y.
///
/// Shapes:  x [..., num_classes], targets [...], class_weight [num_classes] -> y [], or [...] with
///          a loss for each row.
/// Dtypes:  targets int64; y float32, float64 where x is.
/// Throws:  as kernel_ops::LinearCrossEntropy.
const OpDef kCrossEntropy = loss_of_logits_definition();

/// The cross entropy of logits = x weight^T + bias, as kernel_ops::LinearCrossEntropy defines it.
/// The logits of all rows are never in memory together. With a mean or a sum, forward also computes
/// the required gradients, and backward multiplies them by the gradient of y; it reads neither x
/// nor weight, and nothing is computed twice. With a loss for each row, backward recomputes the
/// logits.
///
/// Shapes:  x [..., in_features], targets [...], weight [num_classes, in_features], bias and
///          class_weight [num_classes] -> y [], or [...] with a loss for each row; predictions
///          [...].
/// Dtypes:  targets and predictions int64; y float32, float64 where weight is; the product has the
///          dtype of autocast, else of weight.
/// Throws:  as kernel_ops::LinearCrossEntropy.
const OpDef kLinearCrossEntropy = loss_definition(
    "linear_cross_entropy", "y = mean of cross_entropy(x weight^T + bias, targets)", {});

/// kLinearCrossEntropy with an extra output: the class of the largest logit of each row, also of
/// rows that are ignored.
const OpDef kLinearCrossEntropyWithPredictions =
    loss_definition("linear_cross_entropy_with_predictions",
                    "y = mean of cross_entropy(logits, targets), predictions = argmax(logits), "
                    "logits = x weight^T + bias",
                    {"predictions"});

TANDEM_REGISTER_OP(kCrossEntropy);
TANDEM_REGISTER_OP(kLinearCrossEntropy);
TANDEM_REGISTER_OP(kLinearCrossEntropyWithPredictions);

}  // namespace tandem::ops
