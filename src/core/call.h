// The arguments of an implementation: the step that it runs, and the values of the run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>

#include "core/step.h"
#include "kernel_ops/framework/kernel_op.h"
#include "tandem/export.h"

namespace tandem {

/// How a frame runs its steps.
enum class Path : uint8_t {
  /// On dense tensors without modes: kernels write into tensors that the frame allocates.
  direct,
  /// Through the dispatcher, where tracing, modes and subclasses see each kernel op.
  dispatch,
  /// In differentiable ATen operations under autograd: for functorch, forward-mode differentiation
  /// and backward of backward.
  composite,
};

/// A value that user code saved: tensors, and fields that are no tensors.
struct Opaque {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<void> fields;
};

/// The values of one run of one direction of a plan.
class TANDEM_API Frame {
 public:
  /// `slots` is the number of tensors.
  Frame(Path path, const std::vector<Type>& types, const std::vector<uint32_t>& slot_of,
        size_t slots)
      : path_(path), types_(types), slot_of_(slot_of), tensors_(slots) {}

  Path path() const { return path_; }
  const Type& type(Value value) const { return types_[index_of(value)]; }

  at::Tensor& tensor(Value value, size_t part = 0) {
    return tensors_[slot_of_[index_of(value)] + part];
  }
  /// Holds a value as the parts that it consists of along its first dimension. `tensor` then
  /// returns a tensor of its sizes, dtype and device without elements, until `whole` joins the
  /// parts.
  void hold(Value value, at::TensorList parts);
  /// Returns the parts of a value that is held as parts, even where they have been joined too; null
  /// for other values.
  const std::vector<at::Tensor>* parts(Value value) const {
    for (const Held& held : held_)
      if (held.value == value) return &held.parts;
    return nullptr;
  }
  /// Returns a tensor with its elements.
  at::Tensor& whole(Value value, size_t part = 0) {
    if (!held_.empty()) join(value);
    return tensor(value, part);
  }
  /// Returns all tensors of a value. The tensors of an opaque value are those that its op saved.
  at::TensorList tensors(Value value) {
    if (!held_.empty()) join(value);
    if (type(value).format == Format::opaque) return opaque(value).tensors;
    return {tensors_.data() + slot_of_[index_of(value)], tensors_per_value(type(value))};
  }
  /// Records, and returns, the sizes of the numbers that packed codes stand for; null where no
  /// sizes were recorded.
  void note_sizes(Value codes, c10::SymDimVector sizes) {
    noted_.emplace_back(codes, std::move(sizes));
  }
  const c10::SymDimVector* noted_sizes(Value codes) const {
    for (const auto& [value, sizes] : noted_)
      if (value == codes) return &sizes;
    return nullptr;
  }
  /// Gives a value in codes those of its direction.
  void set_codes(Value value, const Codes& codes) {
    const Type& own = type(value);
    for (size_t part = 0; part < tensors_per_value(own); ++part)
      tensor(value, part) = codes.parts[part_of(own.direction, part)];
    if (is_packed(*own.quantizer)) note_sizes(value, codes.sizes);
  }
  /// Returns a value in codes, or in numbers, as an operand that refers to its tensors.
  CodedMatrix operand(Value value) {
    const Type& own = type(value);
    if (own.format != Format::codes) return whole(value);
    const at::TensorList parts = tensors(value);
    return {parts[0], own.quantizer, own.direction, &parts[1],
            parts.size() == kPartsOfCodes ? &parts[kPartsOfCodes - 1] : nullptr};
  }
  Opaque& opaque(Value value) { return opaques_[slot_of_[index_of(value)]]; }
  c10::SymDimVector& shape(Value value) { return shapes_[slot_of_[index_of(value)]]; }
  void reserve_side_values(size_t opaques, size_t shapes) {
    opaques_.resize(opaques);
    shapes_.resize(shapes);
  }

  /// The object that a caller passes to user code of forward while it runs, or null.
  const void* given() const { return given_; }
  void give(const void* given) { given_ = given; }

  /// Returns a contiguous tensor on the device of `like`.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like);
  /// Drops a value that no later step reads. Memory that only this frame held serves the next
  /// `allocate` (kernel_ops/framework/memory.h).
  void drop(Value value);

 private:
  /// Joins the parts of a value that is held as parts.
  void join(Value value);

  Path path_;
  const void* given_ = nullptr;
  const std::vector<Type>& types_;
  const std::vector<uint32_t>& slot_of_;
  c10::SmallVector<at::Tensor, 48> tensors_;
  std::vector<Opaque> opaques_;
  std::vector<c10::SymDimVector> shapes_;
  std::vector<std::pair<Value, c10::SymDimVector>> noted_;
  struct Held {
    Value value;
    std::vector<at::Tensor> parts;
    bool is_joined = false;
  };
  std::vector<Held> held_;
};

/// A running step: operands by index, results that are demanded, options.
class Call {
 public:
  Call(Frame& frame, const Step& step) : frame_(frame), step_(step) {}

  const Step& step() const { return step_; }
  Frame& frame() { return frame_; }
  Path path() const { return frame_.path(); }

  /// Whether the plan has this operand of the step. The planner checks that an earlier step wrote
  /// it.
  bool has(size_t read) const { return exists(step_.reads[read]); }
  /// Returns the tensor of a read, or one part of a read in codes.
  const at::Tensor& in(size_t read, size_t part = 0) const {
    return frame_.whole(step_.reads[read], part);
  }
  /// Returns a tensor with the sizes, dtype and device of a read, but perhaps not its elements.
  const at::Tensor& like(size_t read) const { return frame_.tensor(step_.reads[read]); }
  /// Returns the parts of a read that is held as parts (Frame::hold), else null.
  const std::vector<at::Tensor>* parts(size_t read) const {
    return frame_.parts(step_.reads[read]);
  }
  /// Returns the tensor of a read, or nullopt where the operand is absent.
  std::optional<at::Tensor> maybe(size_t read) const {
    return has(read) ? std::optional(in(read)) : std::nullopt;
  }
  const Type& type(size_t read) const { return frame_.type(step_.reads[read]); }
  /// Returns a read as an operand, which refers to the frame's tensors.
  CodedMatrix operand(size_t read) const { return frame_.operand(step_.reads[read]); }
  Format format(size_t read) const { return type(read).format; }

  /// The range of a step's n-th list operand in its reads, or in its writes.
  const ListRange& read_list(size_t list) const { return step_.read_lists[list]; }
  const ListRange& write_list(size_t list) const { return step_.write_lists[list]; }
  /// Returns a tensor that the step mutates.
  const at::Tensor& mutated(size_t place) const { return frame_.tensor(step_.mutates[place]); }
  /// Returns the mutations that a fused step performs for a member, by index in FusedRun::mutates;
  /// the range is empty where no gradient demands the mutation.
  ListRange mutated_for(size_t effect) const { return step_.effects[effect].mutates; }

  bool wants(size_t write) const { return exists(step_.writes[write]); }
  /// The type of a write in the plan.
  const Type& out_type(size_t write) const { return frame_.type(step_.writes[write]); }
  void out(size_t write, at::Tensor tensor, size_t part = 0) {
    frame_.tensor(step_.writes[write], part) = std::move(tensor);
  }
  template <size_t N>
  std::array<bool, N> output_mask() const {
    std::array<bool, N> mask;
    for (size_t i = 0; i < N; ++i) mask[i] = wants(i);
    return mask;
  }

  /// The options of the step, or of a member of a fused step by its index in the pattern.
  template <typename T>
  const T& options(size_t op = 0) const {
    return *static_cast<const T*>(step_.options[op].get());
  }

  /// Records the implementations that the step used, for `explain`.
  void took(kernel_ops::ImplementationNames names) { step_.taken.add(names); }

  /// Runs kernel op K on this call's path: by the first implementation that takes the arguments,
  /// into tensors of the frame; through the dispatcher; or in composite form. `spare[i]` is a
  /// tensor that no later step reads; result i is written into it where its sizes and dtype fit. It
  /// may be an argument.
  template <typename K>
  kernel_ops::ResultsOf<K> run(const typename K::Args& args, at::TensorList spare = {}) {
    if (path() == Path::dispatch) {
      took(kernel_ops::kDispatcher);
      return kernel_ops::dispatch<K>(args);
    }
    const auto choice =
        path() == Path::direct ? kernel_ops::choose<K>(args) : kernel_ops::Choice<K>();
    took(kernel_ops::name_of<K>(choice));
    return kernel_ops::run_choice<K>(
        choice,
        [&](size_t i, const kernel_ops::ResultSpec& spec) {
          const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(spec.sizes);
          if (i < spare.size() && spare[i].defined() && spare[i].scalar_type() == spec.dtype &&
              spare[i].sizes() == sizes)
            return spare[i];
          return frame_.allocate(sizes, spec.dtype, kernel_ops::detail::first_tensor(args));
        },
        args);
  }

  /// Runs K and passes result `places[i]` to write i; without `places`, result i. Row codes, column
  /// codes and amax of each CodesOf follow these writes, where the step has them.
  template <typename K>
  void write(const typename K::Args& args, std::initializer_list<size_t> places = {}) {
    hand_out<K>(args, run<K>(args), places);
  }
  template <typename K>
  void hand_out(const typename K::Args& args, kernel_ops::ResultsOf<K>&& results,
                std::initializer_list<size_t> places = {}) {
    const size_t count = places.size() != 0
                             ? places.size()
                             : std::min(kernel_ops::kMadeCount<K>, step_.writes.size());
    for (size_t i = 0; i < count; ++i)
      if (wants(i)) out(i, std::move(results[places.size() != 0 ? places.begin()[i] : i]));
    kernel_ops::detail::for_each_codes(args, [&](const auto& requested, size_t index) {
      if (!requested) return;
      hand_out_group(
          count + index * std::tuple_size_v<GroupMask>,
          [&] {
            const auto specs = K::shapes(args);
            const auto sizes = kernel_ops::detail::sizes_of_source<K>(requested, args, specs);
            return c10::SymDimVector(sizes.begin(), sizes.end());
          },
          results.data() + kernel_ops::kMadeCount<K> + index * group_size);
    });
  }
  /// Passes the tensors of a group to three writes from `first` on: row codes, column codes, amax.
  /// `sizes()` returns the sizes of the quantized tensor.
  template <typename Sizes>
  void hand_out_group(size_t first, Sizes&& sizes, at::Tensor* group) {
    for (const Direction direction : {Direction::row, Direction::column})
      if (const size_t write = first + static_cast<size_t>(direction); wants(write)) {
        const Type& type = out_type(write);
        for (size_t part = 0; part < tensors_per_value(type); ++part)
          out(write, std::move(group[part_of(direction, part)]), part);
        note_sizes(step_.writes[write], type, sizes);
      }
    if (const size_t write = first + place_in_mask(group_amax); wants(write))
      out(write, std::move(group[group_amax]));
  }

  /// Returns the request for the codes of three writes from `write` on: row codes, column codes,
  /// amax. `given` is the read of the quantizer's argument. A null quantizer requests nothing.
  kernel_ops::RequestedCodes codes(const Quantizer* quantizer, size_t given, size_t write) const {
    if (quantizer == nullptr) return {};
    return {quantizer, maybe(given), {wants(write), wants(write + 1), wants(write + 2)}};
  }

  /// Records the sizes of the quantized tensor for later steps of the run, because packed codes do
  /// not determine the length of its last dimension.
  template <typename Sizes>
  void note_sizes(Value codes, const Type& type, Sizes&& sizes) {
    if (type.format == Format::codes && is_packed(*type.quantizer))
      frame_.note_sizes(codes, sizes());
  }
  /// Returns the sizes of the numbers of a read: the sizes of its tensor, recorded sizes, or else
  /// the sizes of packed codes with their padding.
  c10::SymDimVector sizes_of_numbers(size_t read) const {
    const Value value = step_.reads[read];
    const Type& type = frame_.type(value);
    const auto sizes = frame_.tensor(value).sym_sizes();
    if (type.format != Format::codes) return {sizes.begin(), sizes.end()};
    if (const c10::SymDimVector* noted = frame_.noted_sizes(value)) return *noted;
    return tandem::sizes_of_numbers(*type.quantizer, sizes, type.direction);
  }

 private:
  Frame& frame_;
  const Step& step_;
};

}  // namespace tandem
