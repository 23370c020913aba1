#include "kernel_ops/kernel_op.h"

#include <c10/util/Exception.h>

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

}  // namespace tandem::kernel_ops::detail
