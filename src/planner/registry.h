// Fusions that users register, from C++ and Python.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/fusion.h"
#include "planner/fuse.h"
#include "tandem/export.h"

namespace tandem {

/// A registered fusion; `remove()` or destruction unregisters it. Registering and unregistering
/// make every cached program outdated.
class TANDEM_API FusionHandle {
 public:
  explicit FusionHandle(uint64_t id) : id_(id) {}
  FusionHandle(FusionHandle&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  FusionHandle& operator=(FusionHandle&& other) noexcept {
    remove();
    id_ = std::exchange(other.id_, 0);
    return *this;
  }
  ~FusionHandle() { remove(); }
  void remove();
  /// Leaves the fusion registered for the life of the process.
  void release() { id_ = 0; }

 private:
  uint64_t id_;
};

/// Registers a fusion after (`prepend`: before) the user fusions of its pass.
///
/// Throws: c10::ValueError if the name is taken; if the fusion has no pattern, no implementation
///         or, as a joint fusion, no backward half; if the pattern names a step that no registered
///         op has in this pass, or links two steps by an operand that they do not have.
TANDEM_API FusionHandle register_fusion(Fusion fusion, bool prepend = false);

namespace detail {
struct FusionRegistration {
  explicit FusionRegistration(Fusion fusion) { register_fusion(std::move(fusion)).release(); }
};
}  // namespace detail

/// Registers the tandem::Fusion in a variable when its library is loaded, for the life of the
/// process. Ops that the pattern names must be registered before: in the same file they stand above
/// it.
#define TANDEM_REGISTER_FUSION(fusion) \
  static const ::tandem::detail::FusionRegistration tandem_fusion_registration_##fusion { fusion }

/// A number that changes with every registration and removal. Every description contains it.
TANDEM_API uint64_t fusions_version();

/// The user fusions that are registered now. A plan holds those that its backward may still need.
TANDEM_API UserFusions user_fusions();

/// Sets the function that returns a front's fusions over op lists.
TANDEM_API void set_group_fusions(decltype(UserFusions::groups) groups);
/// A front with fusions over op lists must call this whenever they change.
TANDEM_API void bump_fusions_version();

}  // namespace tandem
