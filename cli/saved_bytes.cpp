#include "saved_bytes.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <unordered_map>

namespace tandem::cli {

namespace {

/// The bytes of each storage during a count.
std::unordered_map<const void*, int64_t>* counted = nullptr;

struct CountingHooks final : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& tensor) override {
    kept = tensor;
    if (counted && tensor.defined() && tensor.has_storage()) {
      const at::Storage& storage = tensor.storage();
      (*counted)[storage.unsafeGetStorageImpl()] = static_cast<int64_t>(storage.nbytes());
    }
  }
  at::Tensor call_unpack_hook() override { return kept; }

  at::Tensor kept;
};

/// In C++, only the autograd engine can hook every tensor that is saved.
struct CountingEngine final : torch::autograd::Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return std::make_unique<CountingHooks>();
  }
};

torch::autograd::Engine& counting_engine() {
  static auto& engine =
      *new CountingEngine;  // never destroyed: its destructor expects to be the only engine's
  return engine;
}

}  // namespace

int64_t saved_for_backward_bytes(const std::function<void()>& forward,
                                 const std::function<bool(const void*)>& leave_out) {
  std::unordered_map<const void*, int64_t> by_storage;
  struct Counting {
    explicit Counting(std::unordered_map<const void*, int64_t>& into) {
      counted = &into;
      torch::autograd::set_default_engine_stub(&counting_engine);
    }
    ~Counting() {
      counted = nullptr;
      torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
    }
  } counting(by_storage);
  forward();
  int64_t bytes = 0;
  for (const auto& [storage, size] : by_storage) bytes += leave_out(storage) ? 0 : size;
  return bytes;
}

}  // namespace tandem::cli
