#include "kernel_ops/framework/kernel_op.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_add_batch_dim.h>
#include <ATen/ops/_remove_batch_dim.h>
#include <ATen/ops/stack.h>

#include <cstdlib>

#include "kernel_ops/framework/register.h"

namespace tandem::kernel_ops {

std::vector<std::string>& decomposable_ops() {
  static std::vector<std::string> names;
  return names;
}

namespace detail {

void run_each(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = -1, count = 0;
  const auto look_at = [&](const Tensor& tensor) {
    const auto* const batched = at::maybeGetBatchedImpl(tensor);
    if (batched == nullptr) return;
    for (const at::BatchDim& each : batched->bdims())
      if (each.level() > level) level = each.level(), count = batched->value().size(each.dim());
  };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) look_at(argument.toTensor());
    if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorVector()) look_at(tensor);
  }
  const auto sample = [&](const Tensor& tensor, int64_t i) {
    return tensor.defined() ? at::_remove_batch_dim(tensor, level, count, 0).select(0, i) : tensor;
  };
  std::vector<std::vector<Tensor>> results(op.schema().returns().size());
  for (int64_t i = 0; i < count; ++i) {
    torch::jit::Stack each;
    for (const c10::IValue& argument : arguments) {
      if (argument.isTensor()) {
        each.emplace_back(sample(argument.toTensor(), i));
      } else if (argument.isTensorList()) {
        std::vector<Tensor> tensors = argument.toTensorVector();
        for (Tensor& tensor : tensors) tensor = sample(tensor, i);
        each.emplace_back(std::move(tensors));
      } else {
        each.push_back(argument);
      }
    }
    op.callBoxed(each);
    for (size_t r = 0; r < results.size(); ++r) results[r].push_back(each[r].toTensor());
  }
  for (const std::vector<Tensor>& of_samples : results)
    stack->emplace_back(at::_add_batch_dim(at::stack(of_samples), 0, level));
}

void require_one_device(const std::string& op, c10::ArrayRef<const Tensor*> arguments) {
  const auto* const first =
      std::ranges::find_if(arguments, [](const Tensor* each) { return each != nullptr; });
  const auto* const other = std::find_if(first, arguments.end(), [&](const Tensor* each) {
    return each != nullptr && each->device() != (*first)->device();
  });
  if (other == arguments.end()) return;
  // The tensors of a list share one name.
  const auto name_of = [&](const Tensor* const* argument) {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto with_codes = dispatcher.findSchema({op, "codes"});
    const auto found = with_codes ? *with_codes : dispatcher.findSchemaOrThrow(op.c_str(), "");
    std::vector<std::string> names;
    for (const auto& each : found.schema().arguments())
      if (each.type()->str().find("Tensor") != std::string::npos) names.push_back(each.name());
    const auto place = static_cast<size_t>(argument - arguments.begin());
    return names[std::min(place, names.size() - 1)];
  };
  TORCH_CHECK_VALUE(false, op, ": expected ", name_of(first), " and ", name_of(other),
                    " on one device, got ", (*first)->device(), " and ", (*other)->device(),
                    ". Move the module or its input: both have .to(device).");
}

void refuse_without_memory(const Tensor& tensor) {
  TORCH_CHECK_VALUE(false, "pipeline: expected tensors with memory, got one of shape ",
                    tensor.sizes(),
                    " whose storage was given back. Keep it until backward is done.");
  std::abort();  // not reached
}

void check_no_codes_asked(const char* op, const RequestedCodes& requested) {
  TORCH_CHECK_VALUE(!requested.given && requested.wanted == GroupMask{}, op,
                    ": expected a quantizer for what is given and wanted of codes, got none. Name "
                    "one, or ask for no codes.");
}

Group quantized(const Tensor& x, const RequestedCodes& requested) {
  using SevenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto quantize = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("tandem::quantize", "")
                                   .typed<SevenTensors(const Tensor&, const std::optional<Tensor>&,
                                                       std::string_view, GroupMask)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return std::apply([](auto&&... part) { return Group{std::move(part)...}; },
                    quantize.call(x, requested.given, requested.quantizer->text, requested.wanted));
}

}  // namespace detail

}  // namespace tandem::kernel_ops
