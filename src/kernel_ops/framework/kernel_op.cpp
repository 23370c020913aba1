#include "kernel_ops/framework/kernel_op.h"

#include <c10/util/Exception.h>

#include <cstdlib>

namespace tandem::kernel_ops::detail {

void require_one_device(const char* op, c10::ArrayRef<const Tensor*> arguments) {
  size_t first = arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == nullptr) continue;
    if (first == arguments.size()) first = i;
    if (arguments[i]->device() == arguments[first]->device()) continue;
    const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(op, "").schema();
    TORCH_CHECK_VALUE(false, op, ": expected ", schema.arguments()[first].name(), " and ",
                      schema.arguments()[i].name(), " on one device, got ",
                      arguments[first]->device(), " and ", arguments[i]->device(),
                      ". Move the module or its input: both have .to(device).");
  }
}

void refuse_without_memory(const Tensor& tensor) {
  TORCH_CHECK_VALUE(false, "pipeline: expected tensors with memory, got one of shape ",
                    tensor.sizes(),
                    " whose storage was given back. Keep it until backward is done.");
  std::abort();  // not reached
}

}  // namespace tandem::kernel_ops::detail
