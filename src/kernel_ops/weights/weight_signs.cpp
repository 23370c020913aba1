#include "kernel_ops/weights/weight_signs.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>
#include <variant>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernels/digest.h"

/// The CUDA runtime, if torch has loaded it. The symbol is weak, so that this library loads with a
/// torch that lacks it.
extern "C" __attribute__((weak)) int cudaStreamIsCapturing(void* stream, int* status);

namespace tandem::kernel_ops {

namespace {

std::atomic<int64_t> optimizer_epoch{1};
std::atomic<int64_t> regions{0};
thread_local int64_t region = 0;
thread_local Said said_in_thread = Said::nothing;

using HeldStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using HeldVersion = c10::VariableVersion;

bool is_dead(const HeldStorage& storage) { return storage.expired(); }
bool is_dead(const HeldVersion& version) { return version.unique(); }

/// Assigns numbers to objects; no number is used twice. What an entry holds prevents reuse of the
/// object's address and keeps no data alive. Entries of dead objects are erased once they are as
/// many as the living ones. Guarded by `workspace_mutex`.
template <typename Held, typename More>
class Numbers {
 public:
  struct Entry {
    Held held;
    int64_t number;
    More more = {};
  };

  Entry& of(const void* address, const Held& held) {
    if (const auto known = entries_.find(address); known != entries_.end()) return known->second;
    if (entries_.size() >= limit_) {
      std::erase_if(entries_, [](const auto& entry) { return is_dead(entry.second.held); });
      limit_ = 2 * entries_.size() + 64;
    }
    return entries_.emplace(address, Entry{held, ++last_}).first->second;
  }

 private:
  std::unordered_map<const void*, Entry> entries_;
  int64_t last_ = 0;
  size_t limit_ = 64;
};

/// The last bytes of a weight that were read to make codes, for any of its workspaces.
struct Read {
  /// Digest of the weight's bytes when its codes were last made; 0 if the bytes were not read.
  int64_t content = 0;
  /// How often the bytes had changed by then, or were declared new.
  int64_t rewrites = 0;
};

/// The weights in a storage, keyed by `place_of`.
struct Contents {
  std::unordered_map<int64_t, Read> weights;
  /// How often the whole storage was declared new.
  int64_t rewrites = 0;
};

using Storages = Numbers<HeldStorage, Contents>;

Storages::Entry& entry_of(const at::Tensor& tensor) {
  static auto& numbers = *new Storages;
  const c10::Storage& storage = tensor.storage();
  return numbers.of(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

int64_t number_of_storage(const at::Tensor& tensor) { return entry_of(tensor).number; }

/// The number of the version counter that a tensor shares with its views and with the results of
/// detach(). A weak reference to the tensor itself is no alternative, because
/// torch.utils.swap_tensors refuses tensors that have one.
int64_t number_of_version_counter(const at::Tensor& tensor) {
  static auto& numbers = *new Numbers<HeldVersion, std::monostate>;
  const HeldVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  const void* counter = nullptr;  // its only member, which is private
  static_assert(sizeof(version) == sizeof(counter));
  std::memcpy(&counter, static_cast<const void*>(&version), sizeof(counter));
  return counter == nullptr ? 0 : numbers.of(counter, version).number;
}

/// Whether work on the current stream of the weight's device is recorded into a graph. Up to torch
/// 2.11 streams do not answer this, so the CUDA runtime is queried.
template <typename Stream = c10::Stream>
bool is_captured(Pieces weight) {
  const c10::Device device = weight[0].device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return false;
  const Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    constexpr int kActive = 1;  // cudaStreamCaptureStatusActive
    int status = 0;
    return device.is_cuda() && cudaStreamIsCapturing != nullptr &&
           cudaStreamIsCapturing(stream.native_handle(), &status) == 0 && status == kActive;
  }
}

/// One number that changes with the number of any piece; for one piece, its own number.
template <typename Of>
int64_t combined(Pieces weight, Of&& number_of) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  auto number = static_cast<uint64_t>(number_of(weight[0]));
  for (const at::Tensor& piece : weight.slice(1))
    number = number * kOdd + static_cast<uint64_t>(number_of(piece));
  return static_cast<int64_t>(number);
}

/// Whether writes leave a sign: a tensor of inference mode has no version counter.
bool has_versions(Pieces weight) {
  return std::ranges::none_of(weight, [](const at::Tensor& piece) { return piece.is_inference(); });
}

/// A hash of what the codes depend on besides the weight's numbers and the quantizer.
int64_t hash_of(const at::Tensor& weight, GroupMask mask) {
  size_t hash =
      c10::get_hash(mask[0], mask[1], static_cast<int>(weight.scalar_type()), weight.is_neg());
  for (const int64_t size : weight.sizes()) hash = c10::hash_combine(hash, c10::get_hash(size));
  for (const int64_t stride : strides_of(weight))
    hash = c10::hash_combine(hash, c10::get_hash(stride));
  return static_cast<int64_t>(hash);
}

int64_t address_of(const at::Tensor& piece) {
  return reinterpret_cast<int64_t>(piece.const_data_ptr());
}

Read& read_of(Pieces weight) {
  const int64_t place = combined(weight, [](const at::Tensor& piece) {
    return static_cast<int64_t>(c10::get_hash(address_of(piece), hash_of(piece, {})));
  });
  return entry_of(weight[0]).more.weights[place];
}

/// A number that changes if the bytes may have changed, without reading them: optimizers stepped,
/// other workspaces of the weight found changed bytes, or the weight was declared new.
int64_t reported_writes_of(Pieces weight) {
  constexpr int64_t kApart = int64_t{1} << 32;  // apart from the epochs of steps
  int64_t rewrites = read_of(weight).rewrites;
  for (const at::Tensor& piece : weight) rewrites += entry_of(piece).more.rewrites;
  return optimizer_epoch.load() + kApart * rewrites;
}

}  // namespace

std::mutex& workspace_mutex() {
  static std::mutex mutex;
  return mutex;
}

bool is_recorded(Pieces weight) { return is_captured(weight); }

bool are_on_host(Pieces weight) { return is_on_host(weight[0]); }  // all pieces lie on one device

bool is_readable(Pieces weight) {
  return are_on_host(weight) && std::ranges::all_of(weight, [](const at::Tensor& piece) {
           return piece.is_non_overlapping_and_dense();
         });
}

int64_t content_of(Pieces weight) {
  if (!is_readable(weight)) return 0;
  return combined(weight, [](const at::Tensor& piece) {
    return kernels::cpu::digest(piece.const_data_ptr(), piece.nbytes());
  });
}

int64_t hash_of(const Quantizer& quantizer) {
  return static_cast<int64_t>(c10::get_hash(quantizer.text));
}

Signs signs_of(Pieces weight, const Quantizer& quantizer, GroupMask mask) {
  const auto version_of = [](const at::Tensor& piece) {
    return piece.is_inference() ? -1 : static_cast<int64_t>(piece._version());
  };
  return {combined(weight, number_of_storage),
          combined(weight, address_of),
          combined(weight, number_of_version_counter),
          combined(weight, version_of),
          reported_writes_of(weight),
          region,
          hash_of(quantizer),
          combined(weight, [&](const at::Tensor& piece) { return hash_of(piece, mask); })};
}

void note_read(Pieces weight, int64_t content, bool is_said_new, Signs& signs) {
  Read& read = read_of(weight);
  const bool is_other = content == 0 ? is_said_new : read.content != 0 && read.content != content;
  read.content = content;
  if (is_other) ++read.rewrites;
  signs[epoch] = reported_writes_of(weight);
}

void note_first_microbatch(Pieces weights) {
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  for (const at::Tensor& weight : weights)
    if (weight.has_storage()) ++entry_of(weight).more.rewrites;
}

bool agree(const int64_t* stamp, const Signs& signs, std::initializer_list<Stamp> fields) {
  return std::ranges::all_of(
      fields, [&](Stamp field) { return stamp[field] == signs[static_cast<size_t>(field)]; });
}

bool are_codes_of(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward,
                  std::optional<int64_t>& content_now) {
  if (stamp[storage] == 0 || !agree(stamp, signs, {made_by, layout})) return false;
  const bool has_signs =
      has_versions(weight) &&
      agree(stamp, signs, {storage, data_pointer, version_counter, version, epoch});
  if (said == Said::unchanged && has_signs) return true;
  if (said == Said::first_microbatch && !backward) return false;
  if (are_on_host(weight)) {
    if (!is_readable(weight)) return false;
    content_now = content_of(weight);
    return stamp[content] == *content_now;
  }
  return has_signs &&
         (backward || (signs[stamped_region] != 0 && agree(stamp, signs, {stamped_region})));
}

CodesWere reason(Pieces weight, const int64_t* stamp, const Signs& signs, Said said,
                 bool backward) {
  if (stamp[storage] == 0)
    return stamp[in_forward] == 0 ? CodesWere::first_used
                                  : static_cast<CodesWere>(stamp[in_forward]);
  if (!agree(stamp, signs, {made_by})) return CodesWere::of_another_recipe;
  if (said == Said::first_microbatch && !backward) return CodesWere::of_the_last_step;
  if (are_on_host(weight) && !is_readable(weight)) return CodesWere::not_comparable;
  if (!agree(stamp, signs, {storage, data_pointer, version_counter, layout}))
    return CodesWere::of_another_tensor;
  if (!agree(stamp, signs, {version})) return CodesWere::of_another_version;
  if (!agree(stamp, signs, {epoch})) return CodesWere::before_an_optimizer_step;
  if (are_on_host(weight)) return CodesWere::of_other_bytes;
  if (!has_versions(weight)) return CodesWere::not_comparable;
  return signs[stamped_region] == 0 ? CodesWere::outside_any_region : CodesWere::of_another_region;
}

std::string_view text_of(CodesWere codes) {
  switch (codes) {
    case CodesWere::unused:
      return "not used";
    case CodesWere::found:
      return "found";
    case CodesWere::first_used:
      return "first use";
    case CodesWere::lacking_a_direction:
      return "a direction was missing";
    case CodesWere::of_another_recipe:
      return "the recipe changed";
    case CodesWere::of_another_tensor:
      return "the weight is another tensor";
    case CodesWere::of_another_version:
      return "its version changed";
    case CodesWere::before_an_optimizer_step:
      return "an optimizer stepped";
    case CodesWere::of_other_bytes:
      return "its bytes changed without a version";
    case CodesWere::of_another_region:
      return "a region began";
    case CodesWere::outside_any_region:
      return "outside of any region";
    case CodesWere::not_comparable:
      return "its bytes cannot be compared";
    case CodesWere::of_the_last_step:
      return "the first micro-batch";
    case CodesWere::recorded:
      return "a device graph is recorded";
  }
  return "";
}

int64_t number_of_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  const std::lock_guard<std::mutex> lock(workspace_mutex());
  return number_of_storage(tensor);
}

Said said_now() { return said_in_thread; }
void say(Said said) { said_in_thread = said; }

void weights_changed() { ++optimizer_epoch; }

int64_t current_region() { return region; }
void set_region(int64_t number) { region = number; }
int64_t new_region() { return ++regions; }
int64_t last_region() { return regions; }

}  // namespace tandem::kernel_ops
