#include "core/build_id.h"

#include <elf.h>
#include <link.h>

namespace tandem {

namespace {

struct Search {
  /// An address inside the object that is searched for.
  uintptr_t inside;
  std::string id;
};

bool contains(const dl_phdr_info& object, uintptr_t address) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = object.dlpi_phdr[i];
    const uintptr_t begin = object.dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && address >= begin && address < begin + header.p_memsz)
      return true;
  }
  return false;
}

std::string id_in_notes(const char* note, const char* end) {
  constexpr auto aligned = [](size_t size) { return (size + 3) & ~size_t{3}; };
  while (note + sizeof(ElfW(Nhdr)) <= end) {
    const auto* header = reinterpret_cast<const ElfW(Nhdr)*>(note);
    const char* description = note + sizeof(*header) + aligned(header->n_namesz);
    if (header->n_type == NT_GNU_BUILD_ID) {
      std::string id;
      for (size_t i = 0; i < header->n_descsz; ++i) {
        constexpr char kDigits[] = "0123456789abcdef";
        const auto byte = static_cast<unsigned char>(description[i]);
        id += kDigits[byte >> 4];
        id += kDigits[byte & 15];
      }
      return id;
    }
    note = description + aligned(header->n_descsz);
  }
  return "";
}

int visit(dl_phdr_info* object, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  if (!contains(*object, search.inside)) return 0;
  for (int i = 0; i < object->dlpi_phnum && search.id.empty(); ++i) {
    const ElfW(Phdr)& header = object->dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const char* notes = reinterpret_cast<const char*>(object->dlpi_addr + header.p_vaddr);
    search.id = id_in_notes(notes, notes + header.p_memsz);
  }
  return 1;
}

}  // namespace

const std::string& build_id() {
  static const std::string id = [] {
    Search search{reinterpret_cast<uintptr_t>(&visit), ""};
    dl_iterate_phdr(visit, &search);
    return search.id;
  }();
  return id;
}

}  // namespace tandem
