// Headers that most sources of the program include and that take seconds to parse. It contains no
// header of this project: if one changed, ccache would preprocess it with the old precompiled
// header and see no change.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
