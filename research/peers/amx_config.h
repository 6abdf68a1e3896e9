// Read before every C++ file of llama.cpp (-include). GCC 12 takes it that _tile_loadconfig reads 8 of the 64 bytes of a tile configuration
// and leaves out the stores to the others, so llama.cpp's products in AMX tiles fault; this one reads them all.
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
struct peers_tile_config { char bytes[64]; };
static inline void peers_load_tile_config(const void *config) {
  __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const struct peers_tile_config *)config));
}
#undef _tile_loadconfig
#define _tile_loadconfig peers_load_tile_config
#endif
