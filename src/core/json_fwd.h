// nlohmann::json by name. Programs that register ops name it without reading any: those need none
// of its headers.
#pragma once

#if __has_include(<nlohmann/json_fwd.hpp>)
#include <nlohmann/json_fwd.hpp>
#else
namespace nlohmann {
class json;
}
#endif
