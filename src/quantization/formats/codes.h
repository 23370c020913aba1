// Tensors in codes: a whole one, and the operand that a product or a cast reads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

#include "quantization/formats/group.h"

namespace tandem {

/// A matrix over its last dimension: unquantized, or in the codes of one direction, which may be
/// packed. It refers to tensors of its maker, which must outlive it, so that passing one counts no
/// references. Temporaries do not compile.
struct CodedMatrix {
  // Implicit, so that a function that takes an operand takes a tensor of numbers.
  CodedMatrix(const at::Tensor& read,  // NOLINT(*-explicit-*)
              const Quantizer* by = nullptr, Direction along = Direction::row,
              const at::Tensor* scale = nullptr, const at::Tensor* amax_of_source = nullptr)
      : matrix(read), quantizer(by), direction(along), dequant_scale(scale), amax(amax_of_source) {}
  template <typename... Rest>
  CodedMatrix(const at::Tensor&& read, Rest&&... rest) = delete;

  bool is_column() const { return direction == Direction::column; }
  std::optional<at::Tensor> maybe_amax() const {
    return amax != nullptr ? std::optional(*amax) : std::nullopt;
  }
  /// The operand with these codes or numbers instead, such as a view of them.
  CodedMatrix as(const at::Tensor& other) const {
    return {other, quantizer, direction, dequant_scale, amax};
  }
  CodedMatrix as(const at::Tensor&& other) const = delete;

  const at::Tensor& matrix;
  /// nullptr: the matrix is unquantized.
  const Quantizer* quantizer;
  Direction direction;
  const at::Tensor* dequant_scale;
  /// nullptr if the format has no amax.
  const at::Tensor* amax;
};

/// A tensor in the codes of one direction or of both.
struct Codes {
  const Quantizer* quantizer = nullptr;
  /// row_codes, row_scale, ... of a Group; absent ones are undefined.
  std::array<at::Tensor, group_amax> parts = {};
  /// Those of the dequantized tensor, where the maker knows them.
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::SymDimVector sizes = {};

  bool has(Direction direction) const { return parts[part_of(direction, 0)].defined(); }
  /// The codes of a direction that is there.
  CodedMatrix in(Direction direction) const& {
    const at::Tensor* const own = &parts[part_of(direction, 0)];
    return {own[0], quantizer, direction, &own[1], own[2].defined() ? &own[2] : nullptr};
  }
  CodedMatrix in(Direction direction) const&& = delete;
};

/// The codes of the wanted directions in the results of kernel_ops::Quantize. Codes that serve both
/// directions are there once, as row codes, and go to each of the wanted directions.
Codes codes_in(Group group, const Quantizer& quantizer, bool row, bool column);

}  // namespace tandem
