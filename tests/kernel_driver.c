// Calls one kernel on arrays from stdin and writes all arrays back: see kernels.py.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOUR(w) w, w, w, w
#define TYPES FOUR(uintptr_t), FOUR(uintptr_t), FOUR(uintptr_t), FOUR(uintptr_t), FOUR(uintptr_t)
typedef void (*kernel)(TYPES, TYPES);
#define KERNEL(name) extern void name(void);
#include "kernels.inc"
#undef KERNEL
#define KERNEL(name) {#name, (kernel)name},
static const struct { const char *name; kernel call; } table[] = {
#include "kernels.inc"
};

static uint64_t word(void) {
  uint64_t value = 0;
  if (fread(&value, 8, 1, stdin) != 1) exit(2);
  return value;
}

int main(int argc, char **argv) {
  kernel call = 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (argc == 2 && !strcmp(table[i].name, argv[1])) call = table[i].call;
  if (!call) return 3;
  uintptr_t a[40] = {0};
  size_t bytes[40], arrays = word(), sizes = word(), tiles = word();
  for (size_t i = 0; i < sizes; i++) a[arrays + i] = word();
  for (size_t i = 0; i < arrays; i++) {
    bytes[i] = word();
    // As the runtime gives them: aligned to 64 bytes.
    a[i] = (uintptr_t)aligned_alloc(64, (bytes[i] + 127) / 64 * 64);
    if (bytes[i] && fread((void *)a[i], bytes[i], 1, stdin) != 1) return 4;
  }
  for (size_t tile = tiles; tile-- > 0;) {
    a[arrays + sizes] = tile;
#define AT(i) a[i], a[i + 1], a[i + 2], a[i + 3]
    call(AT(0), AT(4), AT(8), AT(12), AT(16), AT(20), AT(24), AT(28), AT(32), AT(36));
  }
  for (size_t i = 0; i < arrays; i++) fwrite((void *)a[i], bytes[i], 1, stdout);
  return 0;
}
