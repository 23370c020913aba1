// Headers that most sources of the program include, and that take seconds to parse. None of this
// project: ccache preprocesses a changed one with the precompiled header of before, and finds it
// unchanged.
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
